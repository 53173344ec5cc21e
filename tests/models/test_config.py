"""DecoderConfig, its presets and its Hugging Face spelling; rotary embeddings."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jspec.kernels import apply_rope
from jspec.models import PRESETS, DecoderConfig, RopeScaling
from jspec.models.families.hf_config import from_hf_config, to_hf_config
from jspec.models.layers import rope_cos_sin, rope_frequencies
from jspec.weights.tensor_names import parameter_table

ODD = DecoderConfig(
    vocab_size=61, embed_dim=24, hidden_dim=40, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=10, max_seq_len=99, rope_theta=777.0, norm_epsilon=3e-3, qkv_bias=True, out_bias=True,
    mlp_bias=True, bos_id=5, eos_ids=(6, 7), rope_scaling=RopeScaling(5.0, 1.5, 3.5, 64),
)  # fmt: skip

# An old config.json: rope_theta and rope_scaling. The new spelling: rope_parameters.
OLD = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
    "max_position_embeddings": 99, "rms_norm_eps": 3e-3, "tie_word_embeddings": False,
    "attention_bias": True, "mlp_bias": True, "bos_token_id": 5, "eos_token_id": [6, 7],
    "rope_theta": 777.0,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 5.0, "low_freq_factor": 1.5, "high_freq_factor": 3.5,
        "original_max_position_embeddings": 64,
    },
    "torch_dtype": "bfloat16", "use_cache": True, "transformers_version": "4.45.0",
}  # fmt: skip
NEW = {k: v for k, v in OLD.items() if k not in ("rope_theta", "rope_scaling")} | {
    "rope_parameters": OLD["rope_scaling"] | {"rope_theta": 777.0}
}


@pytest.mark.parametrize(
    ("name", "num_params", "factor", "is_tied"),
    [
        ("llama3.2-1b", 1_235_814_400, 32, True),
        ("llama3.2-3b", 3_212_749_824, 32, True),
        ("llama3.1-8b", 8_030_261_248, 8, False),
        ("llama3.1-70b", 70_553_706_496, 8, False),
        ("smollm2-135m", 134_515_008, None, True),
    ],
)
def test_presets_are_the_published_models(name, num_params, factor, is_tied):
    """By the table of tensors, which `test_tensor_names` compares with the model's own."""
    config = PRESETS[name]
    assert sum(math.prod(rule.shape) for rule in parameter_table(config)) == num_params
    assert config.tie_embeddings is is_tied
    if factor is not None:  # 3.2 scales by 32, 3.1 by 8
        assert config.rope_scaling == RopeScaling(factor, 1.0, 4.0, 8192)
        assert (config.rope_theta, config.max_seq_len) == (500_000.0, 131_072)


_OLDER = {k: v for k, v in OLD["rope_scaling"].items() if k != "rope_type"} | {"type": "llama3"}


@pytest.mark.parametrize(
    "raw",
    [
        OLD,
        NEW,
        OLD | {"rope_scaling": _OLDER},
        OLD | {"rope_scaling": OLD["rope_scaling"] | _OLDER},
    ],
    ids=["rope_scaling", "rope_parameters", "type", "both types"],
)
def test_every_spelling_of_rope_is_read(raw):
    """A reader that knows one spelling silently drops the scaling of the other spelling."""
    assert from_hf_config(raw) == ODD


@pytest.mark.parametrize("config", [ODD, *PRESETS.values()], ids=["odd", *PRESETS])
def test_what_is_written_is_read_here_and_by_transformers(config):
    assert from_hf_config(to_hf_config(config)) == config
    theirs = transformers.LlamaConfig(**to_hf_config(config))
    assert from_hf_config(theirs.to_dict()) == config


def test_unknown_keys_are_named():
    """A stranger may change the computation."""
    with pytest.raises(ValueError, match="sliding_window, zebra"):
        from_hf_config(OLD | {"zebra": 1, "sliding_window": 4096})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "expected model_type to be 'mistral'"),
        (
            {"architectures": ["ZebraForCausalLM"]},
            "LlamaForCausalLM, Qwen2.*; got ZebraForCausalLM",
        ),
        ({"architectures": ["LlamaForCausalLM", "B"]}, "got LlamaForCausalLM, B"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantised by an unnamed method"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised by gptq "),
        ({"quantization": {"bits": 4}}, r"by an unnamed method \(quantization\)"),
        ({"compression_config": {"quant_method": "x"}}, r"quantised by x \(compression_config\)"),
        ({"quantization_config": {}}, "take the original weights, with --draft_quantization=int8"),
        (
            {"rope_scaling": {"rope_type": "zebra", "factor": 2.0}},
            "'yarn', 'longrope'; got 'zebra'",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_scaling": OLD["rope_scaling"] | {"zebra": 1}}, "zebra"),
        ({"rope_scaling": OLD["rope_scaling"] | {"partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "differ"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"num_hidden_layers": 0}, "num_hidden_layers to be a whole number from 1 to 10000, got 0"),
        ({"head_dim": 7}, "even"),
        ({"vocab_size": None}, "config lacks the key 'vocab_size'"),
        ({"num_key_value_heads": 0}, "num_kv_heads must be a whole number of at least 1, got 0"),
    ],
)
def test_values_that_cannot_be_honoured_are_refused(change, message):
    """Reading on would give wrong logits without a word."""
    with pytest.raises(ValueError, match=message):
        from_hf_config(OLD | change)


def test_what_is_missing_is_named_or_follows_from_the_rest():
    """There is no sensible default for a shape. Old configs leave two out, and have one end."""
    with pytest.raises(ValueError, match="hidden_size"):
        from_hf_config({k: v for k, v in OLD.items() if k != "hidden_size"})
    raw = {k: v for k, v in OLD.items() if k not in ("num_key_value_heads", "head_dim")}
    config = from_hf_config(raw | {"eos_token_id": 9})
    assert (config.num_kv_heads, config.head_dim, config.eos_ids) == (4, 6, (9,))
    assert from_hf_config(OLD | {"eos_token_id": None}).eos_ids == ()


_LONGROPE = {"factor": 2.0, "kind": "longrope"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta_fast": 0.0}, "beta_fast must be a finite number above 0, got 0.0"),
        ({"original_max_seq_len": -5}, "original_max_seq_len must be"),
        ({"attention_factor": float("inf")}, "attention_factor must be"),
        ({"short_factors": (1.0,) * 5, "long_factors": (0.0,) * 5}, "above 0, got 0.0"),
        ({"short_factors": (1.0,), "long_factors": (1.0,) * 5}, "expected 5 factors.*, got 1"),
    ],
)
def test_rope_settings_that_cannot_be_computed_are_refused(changes, message):
    """Guards against an error while a program is traced, and against frequencies of NaN."""
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ODD, rope_scaling=RopeScaling(**_LONGROPE, **changes))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_theta", float("inf")), ("window", 4.5), ("num_experts", -1), ("expert_dim", "wide"),
        ("num_experts_per_token", 1.5), ("normalize_expert_weights", "no"),
    ],
)  # fmt: skip
def test_fields_of_another_kind_are_refused(field, value):
    """Guards against a model that computes something, but not what its config says."""
    with pytest.raises(ValueError, match=f"{field} must be .*, got {value!r}"):
        dataclasses.replace(ODD, **{field: value})


_SIZES = {
    "vocab_size": 61, "hidden_size": 128, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *((name, {}) for name in ("llama", "mistral", "mixtral", "phi3", "olmo2", "granite")),
        *((name, {}) for name in ("qwen2", "qwen3", "gemma2", "gemma3_text", "smollm3")),
        ("qwen3_moe", {}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
        ("mistral", {"sliding_window": None}),
    ],
)
def test_missing_keys_mean_what_they_mean_to_transformers(name, given):
    """Guards against a window, a base or a number of heads that both read otherwise."""
    given = _SIZES | given
    actual = from_hf_config({"model_type": name} | given)
    theirs = transformers.CONFIG_MAPPING[name](**given)
    expected = from_hf_config(theirs.to_dict() | {"architectures": None})
    ends = {"bos_id": expected.bos_id, "eos_ids": expected.eos_ids}
    assert dataclasses.replace(actual, **ends) == expected


@pytest.mark.parametrize("config", [ODD, *PRESETS.values()], ids=["odd", *PRESETS])
def test_frequencies_equal_transformers(config):
    """Llama 3's scaling divides low frequencies, keeps high ones and blends in between."""
    torch = pytest.importorskip("torch")
    theirs = transformers.LlamaConfig(**to_hf_config(config))
    if config.rope_scaling is not None:
        expected, factor = ROPE_INIT_FUNCTIONS["llama3"](theirs, torch.device("cpu"))
        assert factor == 1.0
    else:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float()
        expected = 1.0 / config.rope_theta ** (exponents / config.head_dim)
    np.testing.assert_allclose(rope_frequencies(config), expected.numpy(), rtol=3e-6)


def test_scaling_reaches_all_three_bands():
    """A preset in which no frequency is blended would not test the blend."""
    config = PRESETS["llama3.2-1b"]
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    ratio = rope_frequencies(config) * config.rope_theta**exponents
    assert (abs(ratio - 1) < 1e-5).any()
    assert (abs(ratio - 1 / 32) < 1e-6).any()
    assert ((ratio > 0.04) & (ratio < 0.99)).any()


def test_angles_are_float32_for_a_bfloat16_model():
    """bfloat16 cannot tell position 257 from 256; float16 ends at 65,504."""
    config, positions = PRESETS["llama3.2-1b"], np.array([257, 4097, 131_071])
    cos, sin = rope_cos_sin(config, jnp.asarray(positions)[None])
    assert cos.dtype == sin.dtype == jnp.float32
    angles = positions[:, None] * rope_frequencies(config).astype(np.float64)
    # One rounding of the angle: half a float32 ulp of it.
    tolerance = positions[:, None] * 2**-24 + 1e-6
    assert np.all(np.abs(cos[0] - np.cos(angles)) < tolerance)
    assert np.all(np.abs(sin[0] - np.sin(angles)) < tolerance)
    heads = jnp.ones([1, 3, 1, 64], jnp.bfloat16)
    rotated = apply_rope(heads, cos, sin)
    assert rotated.dtype == jnp.float32
    np.testing.assert_array_equal(rotated, apply_rope(heads.astype(jnp.float32), cos, sin))

"""DecoderConfig, its presets and its Hugging Face spelling."""

import dataclasses
import math

import pytest
import transformers

from jspec.models import PRESETS, DecoderConfig, RopeScaling
from jspec.models.families.hf_config import from_hf_config, to_hf_config
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
    ("name", "expected"),
    [
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.2-3b", 3_212_749_824),
        ("llama3.1-8b", 8_030_261_248),
        ("llama3.1-70b", 70_553_706_496),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_presets_have_the_published_number_of_parameters(name, expected):
    """By the table of its tensors, which `test_tensor_names` compares with the model's own."""
    assert sum(math.prod(rule.shape) for rule in parameter_table(PRESETS[name])) == expected


@pytest.mark.parametrize(
    ("name", "factor", "tied"),
    [("llama3.2-1b", 32, True), ("llama3.2-3b", 32, True),
     ("llama3.1-8b", 8, False), ("llama3.1-70b", 8, False)],
)  # fmt: skip
def test_llama3_presets_scale_rope(name, factor, tied):
    """3.2 scales by 32, 3.1 by 8; the large ones have their own head."""
    config = PRESETS[name]
    assert config.rope_scaling == RopeScaling(factor, 1.0, 4.0, 8192)
    assert config.rope_theta == 500_000.0
    assert config.tie_embeddings is tied
    assert config.max_seq_len == 131_072


@pytest.mark.parametrize("raw", [OLD, NEW], ids=["rope_scaling", "rope_parameters"])
def test_both_spellings_of_rope_are_read(raw):
    """A reader that knows one spelling silently drops the scaling of the other spelling."""
    assert from_hf_config(raw) == ODD


def test_the_old_name_of_the_rope_type_is_read():
    """Older configs say `type` for `rope_type`, some say both of them."""
    scaling = OLD["rope_scaling"] | {"type": "llama3"}
    assert from_hf_config(OLD | {"rope_scaling": scaling}) == ODD
    del scaling["rope_type"]
    assert from_hf_config(OLD | {"rope_scaling": scaling}) == ODD


@pytest.mark.parametrize("config", [ODD, *PRESETS.values()], ids=["odd", *PRESETS])
def test_round_trip(config):
    assert from_hf_config(to_hf_config(config)) == config


@pytest.mark.parametrize("config", [ODD, PRESETS["llama3.2-1b"]], ids=["odd", "llama3.2-1b"])
def test_transformers_reads_what_we_write(config):
    theirs = transformers.LlamaConfig(**to_hf_config(config))
    assert from_hf_config(theirs.to_dict()) == config


def test_config_of_transformers_itself_is_accepted():
    """Every key that transformers writes by default is handled or listed as ignored."""
    config = from_hf_config(transformers.LlamaConfig().to_dict())
    assert (config.embed_dim, config.num_layers, config.head_dim) == (4096, 32, 128)


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
        ({"model_type": "mistral"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"quantization_config": {"bits": 4}}, "quantised by an unnamed method"),
        *(
            (
                {"quantization_config": {"quant_method": method, "bits": 4}},
                f"quantised by {method} ",
            )
            for method in ("bitsandbytes", "gptq", "awq", "compressed-tensors")
        ),
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
        ({"head_dim": 7}, "even"),
        ({"num_hidden_layers": 0}, "num_hidden_layers to be a whole number from 1 to 10000, got 0"),
        (
            {"num_attention_heads": 0},
            "num_attention_heads to be a whole number from 1",
        ),
        ({"num_key_value_heads": 0}, "num_kv_heads must be a whole number of at least 1, got 0"),
    ],
)
def test_values_that_cannot_be_honoured_are_refused(change, message):
    """Reading on would give wrong logits without a word."""
    with pytest.raises(ValueError, match=message):
        from_hf_config(OLD | change)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers"])
def test_missing_keys_are_named(key):
    """There is no sensible default for a shape."""
    with pytest.raises(ValueError, match=key):
        from_hf_config({k: v for k, v in OLD.items() if k != key})


def test_missing_kv_heads_and_head_dim_follow_from_the_rest():
    """Old configs leave both out: one key head a query head, and an even split."""
    raw = {k: v for k, v in OLD.items() if k not in ("num_key_value_heads", "head_dim")}
    config = from_hf_config(raw)
    assert (config.num_kv_heads, config.head_dim) == (4, 6)


def test_a_single_eos_id_is_read_as_a_tuple():
    assert from_hf_config(OLD | {"eos_token_id": 9}).eos_ids == (9,)
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


def test_configs_are_values():
    """They key compiled functions, so they must hash and compare by content."""
    assert hash(dataclasses.replace(ODD)) == hash(ODD)


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

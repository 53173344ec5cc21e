"""Every family beside transformers, in float32, from the same checkpoint."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from jspec.common.errors import InputError
from jspec.models import DecoderConfig, init_cache
from jspec.models.families.hf_config import from_hf_config, to_hf_config
from jspec.weights.hf import load_hf, save_hf
from tests.cases import slow_unless
from tests.models.family_checkpoints import (
    FAMILIES,
    WINDOW,
    check_rollback,
    check_tree,
    class_name,
    make_checkpoint,
    make_config,
    oracle_logits,
    read_in_chunks,
)

LENGTH = 3 * WINDOW + 2  # past the window, twice
_QUICK = "llama", "gemma3", "mixtral"  # without a window, two bases of angles, experts
_SOME = pytest.mark.parametrize(
    "family", [slow_unless(name in _QUICK, name) for name in FAMILIES], indirect=True
)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("family")
    theirs = make_checkpoint(request.param, folder)
    config, params = load_hf(folder, "float32")
    tokens = np.random.default_rng(3).integers(3, config.vocab_size, (2, LENGTH))
    return request.param, folder, config, params, tokens, oracle_logits(theirs, tokens)


def empty_cache(config):
    return init_cache(config, batch_size=2, capacity=40, dtype=jnp.float32)


def read_config(name):
    """Returns the config.json of a family as transformers writes it."""
    config = make_config(name)
    config.architectures = [class_name(name)]
    return json.loads(config.to_json_string(use_diff=False))


def tolerance(expected):
    return 1e-4 * max(1, np.abs(expected).max())


def test_logits_equal_those_of_transformers(family):
    """In single steps and in chunks longer than the window, with the cache."""
    _, _, config, params, tokens, expected = family
    logits, _ = read_in_chunks(config, params, tokens, empty_cache(config), (1, 8, 9, 10))
    assert np.std(expected) > 0.3  # opinions
    np.testing.assert_allclose(logits, expected, atol=tolerance(expected))


@_SOME
def test_rollback_and_rows_of_other_lengths(family):
    """A window rolls back like everything else; rows keep their own lengths."""
    _, _, config, params, tokens, expected = family
    check_rollback(config, params, tokens, empty_cache(config), expected, tolerance(expected))


@_SOME
def test_a_tree_sees_along_its_paths(family):
    _, _, config, params, tokens, _ = family
    check_tree(config, params, tokens, empty_cache(config), atol=2e-4)


def test_what_is_saved_is_read_back(family, tmp_path):
    """The same config and parameters, and transformers' own names."""
    _, folder, config, params, _, _ = family
    save_hf(tmp_path / "copy", config, params)
    again, leaves = load_hf(tmp_path / "copy", "float32")
    assert again == config
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), leaves, params)
    raw = json.loads((tmp_path / "copy" / "config.json").read_text())
    theirs = json.loads((folder / "config.json").read_text())
    assert raw["architectures"] == theirs["architectures"]
    transformers.AutoConfig.from_pretrained(tmp_path / "copy")  # checks the types


@_SOME
def test_no_field_is_without_effect(family):
    """Each field that a family sets changes the logits: a checkpoint that hides one proves less."""
    name, _, config, params, tokens, expected = family
    inert = {"family", "vocab_size", "max_seq_len", "bos_id", "eos_ids", "num_layers"}
    structural = {"embed_dim", "hidden_dim", "num_heads", "num_kv_heads", "head_dim", "norms",
                  "tie_embeddings", "qkv_bias", "out_bias", "mlp_bias", "qk_norm",
                  "num_experts", "num_experts_per_token", "expert_dim", "dense_layers"}  # fmt: skip
    usual = {f.name: f.default for f in dataclasses.fields(DecoderConfig)}
    set_here = [n for n in usual if n not in inert | structural and getattr(config, n) != usual[n]]
    assert set_here
    for field in set_here:
        if field == "windowed_layers":
            continue  # goes with the window
        plain = dataclasses.replace(config, **{field: usual[field]})
        logits, _ = read_in_chunks(plain, params, tokens[:, :14], empty_cache(config), (7,))
        assert np.abs(logits - expected[:, :14]).max() > 1e-3, (name, field)


def test_config_and_tensors_of_two_families(tmp_path):
    make_checkpoint("olmo2", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    (tmp_path / "config.json").write_text(
        json.dumps({k: v for k, v in raw.items() if k != "attention_bias"})
    )
    with pytest.raises(
        InputError, match=r"missing tensors: model\.layers\.0\.input_layernorm.*unknown tensors"
    ):
        load_hf(tmp_path, "float32")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gemma2", {"layer_types": ["sliding_attention"]}, "expected 4 layer_types"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("llama", {"architectures": ["Qwen4ForCausalLM"]}, "got Qwen4For.*, to which Qwen[23]For"),
        ("qwen3", {"logit_softcapping": 30.0}, "unknown config keys: logit_softcapping"),
        ("llama", {"pruned_heads": {"1": [0]}}, "expected pruned_heads to be {}"),
        ("phi3", {"partial_rotary_factor": 0.75}, "partial_rotary_factor"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("yarn", {"rope_parameters": {"rope_type": "yarn", "mscale": 2.0}}, "mscale"),
    ],
)  # fmt: skip
def test_what_a_family_cannot_honour_is_named(name, change, message):
    """Reading on would give wrong logits without a word."""
    raw = read_config(name)
    with pytest.raises(ValueError, match=message):
        from_hf_config(raw | change)


def test_keys_that_change_nothing_are_ignored():
    """As transformers does, which wrote many of them, and as other programs add theirs."""
    change = {
        "unsloth_version": "2026.1.1", "max_length": 20, "tokenizer_class": "LlamaTokenizer",
        "do_sample": True, "temperature": 0.6, "num_beams": 4, "pruned_heads": {},
        "is_decoder": True, "bad_words_ids": None, "zebra": None, "torchscript": False,
    }  # fmt: skip
    raw = read_config("llama")
    assert from_hf_config(raw | change) == from_hf_config(raw)


@pytest.mark.parametrize("theta", [None, 5e5])
def test_gemma_3_in_its_older_spelling(theta):
    """`rope_theta` and `rope_local_base_freq`, and the window by a pattern."""
    raw = {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 9,
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 7, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 4, "sliding_window": 3, "sliding_window_pattern": 3,
        "rope_local_base_freq": 77.0, "query_pre_attn_scalar": 16,
    } | ({} if theta is None else {"rope_theta": theta})  # fmt: skip
    config = from_hf_config(raw)
    assert config.windowed_layers == (0, 1, 3, 4, 6)
    assert config.rope_theta == (theta or 1e6)
    assert (config.local_rope_theta, config.attention_scale) == (77.0, 0.25)
    assert from_hf_config(to_hf_config(config)) == config

"""T5 and Whisper beside transformers, in float32, from the same checkpoint."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from jspec.models import EncoderConfig, make_apply
from jspec.models.encoder_decoder import relative_buckets
from jspec.models.families.hf_config import from_hf_config
from jspec.weights.hf import load_hf, save_hf
from jspec.weights.tensor_names import parameter_table
from tests.models.encoder_decoder_checkpoints import (
    MODELS,
    VOCAB,
    make_checkpoint,
    make_raw,
    make_sources,
    oracle_logits,
    read_sources,
)
from tests.models.family_checkpoints import check_rollback, check_tree, read_in_chunks

LENGTH = 30  # past the largest distance with a bucket of its own
CUTS = 1, 8, 9, 16, 23


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    name, folder = request.param, tmp_path_factory.mktemp("model")
    theirs = make_checkpoint(name, folder)
    config, params = load_hf(folder, "float32")
    tokens = np.random.default_rng(3).integers(4, VOCAB, (2, LENGTH))
    source = make_sources(name)
    expected = oracle_logits(theirs, name, *source, tokens)
    return folder, config, params, read_sources(config, params, *source), tokens, expected


def tolerance(expected):
    return 1e-4 * max(1, np.abs(expected).max())


def test_logits_equal_those_of_transformers(model):
    """Sources of two lengths, the decoder's tokens in single steps and in chunks."""
    _, config, params, cache, tokens, expected = model
    logits, _ = read_in_chunks(config, params, tokens, cache, CUTS)
    assert np.std(expected) > 0.3  # opinions
    np.testing.assert_allclose(logits, expected, atol=tolerance(expected))


def test_rollback_leaves_the_source(model):
    """Rows go back to their own lengths and read on; the constants are the same arrays."""
    _, config, params, cache, tokens, expected = model
    after = check_rollback(config, params, tokens, cache, expected, tolerance(expected))
    jax.tree.map(np.testing.assert_array_equal, after.source, cache.source)


def test_a_tree_sees_along_its_paths(model):
    _, config, params, cache, tokens, expected = model
    check_tree(config, params, tokens, cache, tolerance(expected))


def test_what_is_saved_is_read_back(model, tmp_path):
    _, config, params, *_ = model
    save_hf(tmp_path / "copy", config, params)
    again, leaves = load_hf(tmp_path / "copy", "float32")
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, leaves, params)


@pytest.mark.parametrize("has_head", [False, True])
def test_a_t5_1_1_that_is_called_tied(has_head, tmp_path):
    """Transformers 5 calls all of them so: the file says whether they have their own head."""
    theirs = make_checkpoint("t5 1.1", tmp_path)
    if not has_head:
        theirs.lm_head.weight = theirs.shared.weight
    theirs.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["tie_word_embeddings"]
    assert not raw["scale_decoder_outputs"]
    config, params = load_hf(tmp_path, "float32")
    assert config.tie_embeddings != has_head
    source, tokens = make_sources("t5 1.1"), np.arange(4, 24).reshape(2, 10)
    expected = oracle_logits(theirs, "t5 1.1", *source, tokens)
    cache = read_sources(config, params, *source)
    logits, _ = read_in_chunks(config, params, tokens, cache)
    np.testing.assert_allclose(logits, expected, atol=tolerance(expected))
    save_hf(tmp_path / "copy", config, params)
    assert load_hf(tmp_path / "copy", "float32")[0] == config


def test_no_field_of_the_encoder_is_without_effect(model):
    """A number that does not count would hide a mistake: each changes the logits."""
    _, config, params, cache, tokens, expected = model
    if config.encoder.is_audio:
        return
    for field, value in (("num_buckets", 10), ("max_distance", 15)):
        changed = dataclasses.replace(config.encoder, **{field: value})
        changed = dataclasses.replace(config, encoder=changed)
        logits, _ = read_in_chunks(changed, params, tokens, cache, CUTS)
        assert np.abs(logits - expected).max() > 1e-3, field


@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (12, 21), (8, 64)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_buckets_are_those_of_transformers(buckets, distance, is_causal):
    """Near distances apart, far ones together, for any number of buckets."""
    torch = pytest.importorskip("torch")
    from transformers.models.t5.modeling_t5 import T5Attention

    config = EncoderConfig(1, 1, 2, 2, 512, num_buckets=buckets, max_distance=distance)
    distances = torch.arange(-distance, distance + 1)
    theirs = T5Attention._relative_position_bucket(-distances, not is_causal, buckets, distance)
    np.testing.assert_array_equal(relative_buckets(config, is_causal), theirs.numpy())


# T5 1.1 by size: d_model, d_ff, layers of each side, heads of 64; and its parameters.
PAPER = {
    "small": (512, 1024, 8, 6, 76_961_152),
    "xxl": (4096, 10240, 24, 64, 11_135_332_352),
}


@pytest.mark.parametrize("size", PAPER)
def test_the_papers_models_by_shapes(size):
    """Of arXiv 2211.17192, table 2: as many parameters as published, and logits, uncomputed."""
    width, hidden_dim, layers, heads, num_params = PAPER[size]
    raw = {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 32128,
        "d_model": width, "d_kv": 64, "d_ff": hidden_dim, "num_layers": layers, "num_heads": heads,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "eos_token_id": 1,
    }  # fmt: skip
    config = from_hf_config(raw)
    table = parameter_table(config)
    assert sum(np.prod(rule.shape, dtype=int) for rule in table) == num_params
    params = unflatten_dict(
        {rule.path: jax.ShapeDtypeStruct(rule.shape, jnp.bfloat16) for rule in table}
    )

    def logits(params, source, tokens):
        cache = read_sources(config, params, source, np.array([9, 5]), capacity=16)
        return make_apply(config)(params, tokens, cache)[0]

    source, tokens = (jax.ShapeDtypeStruct((2, n), jnp.int32) for n in (9, 4))
    assert jax.eval_shape(logits, params, source, tokens).shape == (2, 4, 32128)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("t5", {"feed_forward_proj": "gated-silu"}, "expected feed_forward_proj among 'relu'"),
        ("t5", {"zebra": 1}, "unknown config keys: zebra"),
        ("t5", {"d_kv": None}, "config lacks the key 'd_kv'"),
        ("t5", {"num_heads": 2.5}, "expected num_heads to be a whole number from 1"),
        ("t5", {"relative_attention_max_distance": 4}, "expected max_distance above 6"),
        ("whisper", {"scale_embedding": True}, "expected scale_embedding to be False, got True"),
        ("whisper", {"encoder_attention_heads": 5}, "encoder_attention_heads to divide d_model 24"),
        ("whisper", {"suppress_tokens": ["a"]}, "suppressed tokens must be whole numbers"),
    ],
)
def test_a_config_that_cannot_be_honoured(name, change, message):
    with pytest.raises(ValueError, match=message):
        from_hf_config(make_raw(name) | change)

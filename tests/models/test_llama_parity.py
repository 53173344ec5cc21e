"""Logits and hidden states equal transformers' LlamaForCausalLM."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models import init_cache, make_apply
from tests.models.oracle import config_of, oracle_outputs, params_of, peaked_llama

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 777.0, "factor": 5.0, "low_freq_factor": 1.5,
    "high_freq_factor": 3.5, "original_max_position_embeddings": 16,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 777.0}
NUM_TOKENS = 12
# Rows start at different positions, one far past the original context.
STARTS = np.array([0, 30, 301])

# Key heads, rotary embeddings, whether the embedding is tied, and biases: every pair of values.
VARIANTS = [
    (1, PLAIN, False, True), (1, LLAMA3, True, False), (2, PLAIN, True, True),
    (2, LLAMA3, False, False), (4, LLAMA3, True, True), (4, PLAIN, False, False),
]  # fmt: skip


def build(kv_heads, rope, tied, biased, head_dim=10):
    return peaked_llama(
        num_key_value_heads=kv_heads, rope_parameters=rope, tie_word_embeddings=tied,
        attention_bias=biased, mlp_bias=biased, head_dim=head_dim, num_hidden_layers=2,
    )  # fmt: skip


def run_ours(model, tokens, positions, **options):
    config = config_of(model)
    cache = init_cache(config, batch_size=len(tokens), capacity=16, dtype=jnp.float32)
    apply = jax.jit(make_apply(config), static_argnames="hidden_layers")
    return apply(params_of(model), jnp.asarray(tokens, jnp.int32), cache,
                 positions=jnp.asarray(positions, jnp.int32), **options)  # fmt: skip


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 61, (3, NUM_TOKENS))


@pytest.fixture(scope="module")
def positions():
    return STARTS[:, None] + np.arange(NUM_TOKENS)


@pytest.mark.parametrize(("kv_heads", "rope", "tied", "biased"), VARIANTS)
def test_logits_equal_transformers(kv_heads, rope, tied, biased, tokens, positions):
    """A wrong head order, norm epsilon, RoPE scaling or bias shows here; loading alone proves not.

    head_dim 10 is not embed_dim / num_heads = 6.
    """
    model = build(kv_heads, rope, tied, biased)
    expected, _ = oracle_outputs(model, tokens, positions)
    logits, _, _ = run_ours(model, tokens, positions)
    probs = np.asarray(jax.nn.softmax(logits))
    entropy = -np.sum(probs * np.log(np.maximum(probs, 1e-30)), axis=-1).mean()
    assert entropy < 0.7 * np.log(61), "the model has no opinions: equality would prove nothing"
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("kv_heads", "rope"), [(1, LLAMA3), (4, PLAIN)], ids=str)
def test_logits_equal_transformers_where_cpp_computes_them(kv_heads, rope, library, tokens):
    """Products and attention are C++ at these shapes: a block of one row, then token by token."""
    model = build(kv_heads, rope, False, True, head_dim=32)
    tokens, positions = tokens[:1], np.arange(NUM_TOKENS)[None]
    expected, _ = oracle_outputs(model, tokens, positions)
    config, params = config_of(model), params_of(model)
    cache = init_cache(config, batch_size=1, capacity=16, dtype=jnp.float32)
    apply, logits = jax.jit(make_apply(config)), []
    for begin, end in [(0, 8), *((i, i + 1) for i in range(8, NUM_TOKENS))]:
        block = jnp.asarray(tokens[:, begin:end], jnp.int32)
        program = apply.lower(params, block, cache).as_text()
        assert "jspec_product" in program
        assert "jspec_attention" in program
        actual, _, cache = apply(params, block, cache)
        cache = cache.commit(jnp.array([end - begin]))
        logits.append(actual)
    np.testing.assert_allclose(np.concatenate(logits, axis=1), expected, atol=1e-4, rtol=0)


def test_rope_scaling_matters_to_the_parity_test(tokens, positions):
    """Guards the test above: without the llama3 scaling its logits would differ by far more."""
    model = build(2, LLAMA3, False, False)
    expected, _ = oracle_outputs(model, tokens, positions)
    model.config.rope_parameters = PLAIN
    logits, _, _ = run_ours(model, tokens, positions)
    assert np.abs(np.asarray(logits) - expected).max() > 0.1


def test_hidden_layers_equal_transformers(tokens, positions):
    """Trained heads read the hidden states of chosen layers: 0 is the embedding."""
    model = build(2, PLAIN, False, True)
    _, expected = oracle_outputs(model, tokens, positions)
    _, hidden, _ = run_ours(model, tokens, positions, hidden_layers=(0, 1))
    np.testing.assert_allclose(hidden, np.stack(expected[:2], axis=2), atol=1e-4, rtol=0)
    _, normed, _ = run_ours(model, tokens, positions)  # transformers norms its last state
    np.testing.assert_allclose(normed, expected[-1], atol=1e-4, rtol=0)

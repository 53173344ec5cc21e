"""Fused attention: the same numbers as XLA's, or a fall-back with one warning.

On CPU, where JAX's own attention stands in for cuDNN's: what is tested is layouts, the mask, and
what follows where a shape fails.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.kernels import attend, attention
from jspec.kernels.attention import attend_fused
from jspec.models import causal_mask, init_cache, make_apply
from jspec.models.cache import TAIL, KVCache
from tests.tiny import CONFIG, random_params

SHAPES = [(1, 64, 9, 3, 112 + TAIL, 64), (3, 70, 8, 1, 96 + TAIL, 6)]
USUAL = 2, 64, 4, 2, 128, 6
attend_by_xla = inspect.unwrap(attend)


@pytest.fixture
def stand_in(monkeypatch):
    """Makes attention believe in a GPU whose cuDNN is JAX's own; nothing was tried before."""

    def attend_by_head(queries, keys, values, mask):
        """Takes [b n t h] and [b k s h], as cuDNN does."""
        rows = (part.transpose(0, 2, 1, 3) for part in (queries, keys, values))
        mixed = jax.nn.dot_product_attention(*rows, mask=mask, scale=1.0, implementation="xla")
        return mixed.transpose(0, 2, 1, 3)

    monkeypatch.setattr(attention, "_cudnn", attend_by_head)
    monkeypatch.setattr(attention, "_is_on", lambda: True)
    attention._works.cache_clear()
    yield
    attention._works.cache_clear()


@pytest.fixture
def calls(monkeypatch):
    """Counts the calls by their queries, those of trials included."""
    counted = []

    def count(*operands):
        counted.append(operands[0].shape[1])
        return attend_fused(*operands)

    monkeypatch.setattr(attention, "attend_fused", count)
    return counted


def make_operands(shape, dtype, seed=0):
    """Returns queries, a one-layer cache of rows of different lengths, and what they see of it."""
    b, t, n, k, s, h = shape
    rng = np.random.default_rng(seed)
    queries = jnp.asarray(rng.normal(size=(b, t, n, h)) / np.sqrt(h), jnp.float32)
    layers = [jnp.asarray(rng.normal(size=(b, k, s, h)), dtype) for _ in range(2)]
    cache = KVCache((layers[0],), (layers[1],), jnp.arange(b, dtype=jnp.int32) * 13)
    return queries, cache, jax.jit(cache.visible)(causal_mask(t))


@pytest.mark.parametrize(
    ("dtype", "tolerance", "shape"),
    [(jnp.bfloat16, 0.02, SHAPES[0]), (jnp.float32, 1e-5, SHAPES[1])],
)
def test_it_says_what_xlas_attention_says(shape, dtype, tolerance, stand_in):
    """Committed slots and a causal block, one head or several to a key, slots that none may see."""
    queries, cache, visible = make_operands(shape, dtype)
    operands = queries, cache.keys[0], cache.values[0], visible
    expected = jax.jit(attend_by_xla)(*operands)
    results = jax.jit(attend_fused)(*operands)
    assert results.dtype == jnp.float32
    np.testing.assert_allclose(results, expected, atol=tolerance * float(jnp.abs(expected).max()))


def test_a_query_that_sees_nothing_gives_no_nan(stand_in):
    queries, cache, visible = make_operands(SHAPES[0], jnp.bfloat16)
    operands = queries, cache.keys[0], cache.values[0], jnp.zeros_like(visible)
    assert np.isfinite(jax.jit(attend_fused)(*operands)).all()


def test_only_many_queries_on_a_cache_of_bfloat16_are_fused(stand_in, calls):
    """Decoding, verifying and float32 stay with XLA; so does everything where there is no GPU."""
    for t, dtype in ((63, jnp.bfloat16), (1, jnp.bfloat16), (64, jnp.float32)):
        queries, cache, visible = make_operands((2, t, *USUAL[2:]), dtype)
        jax.eval_shape(cache.attend, queries, visible)
    assert not calls
    queries, cache, visible = make_operands(USUAL, jnp.bfloat16)
    jax.eval_shape(cache.attend, queries, visible)
    assert calls == [64, 64]  # tried, and used


def test_without_a_gpu_nothing_is_tried(calls, monkeypatch):
    queries, cache, visible = make_operands(SHAPES[0], jnp.bfloat16)
    monkeypatch.setenv("JSPEC_CUDNN", "0")
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        jax.eval_shape(cache.attend, queries, visible)
    assert not calls


def test_what_fails_is_not_used(stand_in, monkeypatch, capsys):
    """Two layers of a shape, traced: one warning that names the cost, and XLA's numbers."""

    def fail(*_):
        raise RuntimeError("cuDNN is not detected.\nand more")

    monkeypatch.setattr(attention, "attend_fused", fail)
    queries, cache, visible = make_operands(USUAL, jnp.bfloat16)
    expected = jax.jit(attend_by_xla)(queries, cache.keys[0], cache.values[0], visible)
    for _ in range(2):
        result = jax.jit(lambda *operands: cache.attend(*operands))(queries, visible)
        np.testing.assert_array_equal(result, expected)
    assert capsys.readouterr().err == (
        "jspec: cuDNN's attention is not used (RuntimeError: cuDNN is not detected.); "
        "reading prompts takes longer\n"
    )


def test_what_says_something_else_is_not_used(stand_in, monkeypatch, capsys):
    """Heads of another order, as another layout would give."""
    monkeypatch.setattr(attention, "attend_fused", lambda *o: attend_fused(*o)[:, :, ::-1])
    queries, cache, visible = make_operands(USUAL, jnp.bfloat16)
    expected = attend_by_xla(queries, cache.keys[0], cache.values[0], visible)
    np.testing.assert_array_equal(cache.attend(queries, visible), expected)
    assert "not used (on random numbers its results differ" in capsys.readouterr().err


def test_its_derivatives_are_those_of_xlas_attention(stand_in, calls):
    """Training goes through the same call: cuDNN's own derivatives are never asked for."""
    queries, cache, visible = make_operands(USUAL, jnp.bfloat16)

    def loss(attend, queries, keys, values):
        return jnp.sum(jnp.sin(attend(queries, keys, values, visible)))

    operands = queries, cache.keys[0], cache.values[0]
    slopes = jax.jit(jax.grad(loss, (1, 2, 3)), static_argnums=0)
    expected = slopes(attend_by_xla, *operands)
    jax.tree.map(np.testing.assert_array_equal, slopes(attend, *operands), expected)
    assert calls == [64]  # tried, and not used


def test_a_prompt_in_chunks_is_one_full_pass(stand_in, calls, monkeypatch):
    """Invariant 3, within bfloat16's rounding: 64 and 64 tokens, and XLA's 128."""
    apply = make_apply(CONFIG)
    params = random_params(CONFIG, seed=0, std=0.4)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 61, (2, 128)), jnp.int32)

    def read(*widths):
        cache = init_cache(CONFIG, batch_size=2, capacity=160, dtype=jnp.bfloat16)
        logits, begin = [], 0
        for width in widths:
            block = tokens[:, begin : begin + width]
            out, _, cache = jax.jit(apply)(params, block, cache)
            cache = cache.commit(jnp.full([2], width, jnp.int32))
            logits.append(out)
            begin += width
        return jnp.concatenate(logits, axis=1)

    chunks = read(64, 64)
    assert calls.count(64) >= 2  # tried, and used
    num_calls = len(calls)
    monkeypatch.setattr(attention, "_MANY_QUERIES", 1000)
    whole = read(128)
    jax.clear_caches()  # of what was traced with this attention
    assert len(calls) == num_calls
    assert jnp.linalg.norm(chunks - whole) < 0.02 * jnp.linalg.norm(whole)

"""Attention in C++: right to rounding, alone as in a block, and blind behind."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.kernels import attention
from jspec.kernels import library as native
from jspec.kernels.attention import _NATIVE_DIMS
from jspec.models.cache import KVCache

# batch, tokens, heads, key/value heads, slots, dimensions
SHAPES = [
    (1, 1, 9, 3, 272, 64),
    (2, 6, 8, 2, 50, 32),
    (3, 16, 4, 4, 33, 128),
    (1, 5, 6, 1, 99, 256),
    (3, 70, 9, 3, 1300, 64),  # several spans, and texts that end in different ones
]


attend_by_xla = inspect.unwrap(attention.attend)
pytestmark = pytest.mark.usefixtures("library")


@jax.jit
def attend(*operands):
    return native.call("attention", attend_by_xla, native.floats(*operands[0].shape), *operands)


def draw(shape, dtype):
    """Returns peaked queries, keys, values, and what each query may see: a chain in the cache."""
    b, t, n, k, s, h = shape
    rng = np.random.default_rng(0)
    queries = jnp.asarray(3 * rng.normal(size=(b, t, n, h)) / np.sqrt(h), jnp.float32)
    keys, values = (jnp.asarray(rng.normal(size=(b, k, s, h)), dtype) for _ in range(2))
    lengths = rng.integers(1, s - t, b) if s < 600 else np.linspace(40, s - t, b).astype(int)
    ends = lengths[:, None] + np.arange(t)
    return queries, keys, values, jnp.asarray(np.arange(s) <= ends[:, :, None])


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [*(("bfloat16", shape) for shape in SHAPES), ("float32", SHAPES[1]), ("float32", SHAPES[3])],
)
def test_attention_is_that_of_float32(shape, dtype):
    queries, keys, values, visible = draw(shape, dtype)
    exact = attend_by_xla(queries, keys.astype(jnp.float32), values.astype(jnp.float32), visible)
    tolerance = 5e-6 if shape[4] < 600 else 1e-5
    np.testing.assert_allclose(attend(queries, keys, values, visible), exact, atol=tolerance)


@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[4]])
def test_a_query_alone_is_as_in_its_block(shape):
    """Bit for bit, so that a verify call of another width does not change what a token sees."""
    queries, keys, values, visible = draw(shape, "bfloat16")
    together = np.asarray(attend(queries, keys, values, visible))
    for token in range(0, shape[1], 1 + shape[1] // 20):
        place = slice(token, token + 1)
        alone = attend(queries[:, place], keys, values, visible[:, place])
        np.testing.assert_array_equal(alone, together[:, place])


def test_a_prompts_queries_are_many_and_see_few_slots():
    """Guards against XLA, which computes every slot of a long cache for each token of a chunk."""
    queries, keys, values, visible = draw((1, 256, 2, 1, 512, 32), "bfloat16")
    program = jax.jit(attention.attend).lower(queries, keys, values, visible).as_text()
    assert "jspec_attention" in program


def test_slots_behind_the_last_visible_one_are_not_read():
    queries, keys, values, visible = draw((2, 3, 4, 2, 64, 32), "float32")
    behind = ~visible.any(axis=1)[:, None, :, None]
    spoilt = [jnp.where(behind, jnp.nan, leaf) for leaf in (keys, values)]
    np.testing.assert_array_equal(
        attend(queries, *spoilt, visible), attend(queries, keys, values, visible)
    )


def test_a_row_alone_is_as_in_its_batch():
    operands = draw(SHAPES[-1], "bfloat16")
    together = np.asarray(attend(*operands))
    for row in range(SHAPES[-1][0]):
        alone = attend(*(leaf[row : row + 1] for leaf in operands))
        np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.parametrize("shape", [(2, 3, 4, 2, 64, 32), (1, 2, 4, 2, 1000, 32)])
def test_the_capacity_does_not_matter(shape):
    queries, keys, values, visible = draw(shape, "bfloat16")
    wider = [jnp.pad(leaf, [(0, 0), (0, 0), (0, 77), (0, 0)]) for leaf in (keys, values)]
    hidden = jnp.pad(visible, [(0, 0), (0, 0), (0, 77)])
    np.testing.assert_array_equal(
        attend(queries, *wider, hidden), attend(queries, keys, values, visible)
    )


def test_holes_in_what_is_visible():
    """As a tree has them: a slot that is not visible weighs nothing."""
    queries, keys, values, visible = draw((2, 3, 4, 2, 64, 32), "float32")
    visible = visible & jnp.asarray(np.random.default_rng(1).random((2, 3, 64)) < 0.5)
    visible = visible.at[:, :, 0].set(True)
    exact = attend_by_xla(queries, keys, values, visible)
    np.testing.assert_allclose(attend(queries, keys, values, visible), exact, atol=5e-6)


def test_a_query_that_sees_nothing_gives_zeros():
    queries, keys, values, visible = draw((1, 2, 4, 2, 40, 32), "float32")
    assert (attend(queries, keys, values, jnp.zeros_like(visible)) == 0).all()


def test_far_scores_underflow_to_zero_and_do_not_overflow():
    queries, keys, values, visible = draw((1, 2, 4, 2, 40, 32), "float32")
    exact = attend_by_xla(300 * queries, keys, values, visible)
    np.testing.assert_allclose(attend(300 * queries, keys, values, visible), exact, atol=5e-5)


def test_derivatives_and_batching_are_those_of_xlas_attention():
    queries, keys, values, visible = draw((2, 3, 4, 2, 40, 32), "float32")

    def loss(attention, *operands):
        return jnp.sum(jnp.sin(attention(*operands, visible)))

    slopes = jax.jit(jax.grad(loss, (1, 2, 3)), static_argnums=0)
    operands = queries, keys, values
    for ours, theirs in zip(
        slopes(attend, *operands), slopes(attend_by_xla, *operands), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    stacked = [jnp.stack([leaf, leaf[::-1]]) for leaf in (queries, keys, values, visible)]
    np.testing.assert_allclose(
        jax.vmap(attend)(*stacked), jax.vmap(attend_by_xla)(*stacked), atol=5e-6
    )


def test_the_cache_uses_it_for_whole_vectors_only():
    def calls(dims):
        cache = KVCache.init(1, (1, 2, 24, dims), "bfloat16")
        queries = jnp.zeros([1, 3, 4, dims])
        visible = jnp.ones([1, 3, 40], bool)
        text = jax.jit(lambda *a: cache.attend(*a)).lower(queries, visible).as_text()
        return "jspec_attention" in text

    assert [calls(dims) for dims in _NATIVE_DIMS] == [True] * 4
    assert not calls(24)


@pytest.mark.slow  # the whole library is compiled once more
@pytest.mark.parametrize("options", [(), ("-mavx",), ("-mavx2", "-mfma")])
def test_processors_with_narrower_vectors_have_attention_too(options, monkeypatch, tmp_path):
    if not all(option[2:] in native._processor().split() for option in options):
        pytest.skip("this processor has no such vectors")
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "_CPP_OPTIONS", ("-std=gnu++17", "-O1", "-fPIC", "-w", *options))
    name = "_".join(["jspec_attention_elsewhere", *(option[2:] for option in options)])
    handler = jax.ffi.pycapsule(native.load_library(native.cpp_recipe()).jspec_attention)
    jax.ffi.register_ffi_target(name, handler, platform="cpu")
    queries, keys, values, visible = draw((2, 6, 8, 2, 50, 32), "bfloat16")
    result = jax.ShapeDtypeStruct(queries.shape, jnp.float32)
    mixed = jax.jit(jax.ffi.ffi_call(name, result))(queries, keys, values, visible)
    exact = attend_by_xla(queries, keys.astype(jnp.float32), values.astype(jnp.float32), visible)
    np.testing.assert_allclose(mixed, exact, atol=5e-6)

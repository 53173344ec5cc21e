"""Attention of a block in two kernels: the mixed values and the caches of XLA's operations."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.kernels import attend_capped, rms_norm, rotate_heads
from jspec.kernels.gpu import block_attention
from jspec.kernels.gpu.block_attention import attend_block
from jspec.models.cache import TAIL, KVCache
from tests.kernels.families import random_tree

pytestmark = pytest.mark.usefixtures("interpreted")
EPSILON = 0.1

#        b, t, k, g, h, capacity, offset, options
CASES = [
    (1, 1, 2, 1, 32, 40, 0, {}),
    (2, 5, 2, 3, 64, 120, 0, {"norms": True}),
    (3, 4, 1, 5, 48, 300, 0, {"cap": 0.8, "splits": 2}),
    (2, 16, 1, 2, 32, 100, 0, {"splits": 1}),
    (2, 3, 2, 2, 32, 100, 2, {"window": 20}),
    (1, 2, 1, 1, 256, 60, 0, {"norms": True}),
]


def make_block(case, seed):
    """Returns qkv, angles, a cache of random lengths and what is visible: of a tree."""
    b, t, k, g, h, capacity, offset, options = case
    keys = jax.random.split(jax.random.key(seed), 5)
    qkv = jax.random.normal(keys[0], (b, t, k, g + 2, h), jnp.float32)
    angles = jax.random.normal(keys[1], (b, t, h // 2), jnp.float32)
    layers = [jax.random.normal(key, (b, k, capacity + TAIL, h), jnp.bfloat16) for key in keys[2:4]]
    rng = np.random.default_rng(seed)
    # Lengths about the margins of tiles; the last block reaches into the tail.
    ends = np.array([0, 62, 64, 128, capacity])[rng.permutation(5)[:b]]
    length = jnp.asarray(np.clip(ends, 0, capacity - offset - 1), jnp.int32)
    cache = KVCache((layers[0],), (layers[1],), length)
    mask = np.stack([random_tree(rng, t + offset)[offset:] for _ in range(b)])
    visible = cache.visible(jnp.asarray(mask), options.get("window"))
    return qkv, (jnp.cos(angles), jnp.sin(angles)), cache, visible


def norms_of(case):
    h = case[4]
    scales = 1 + jax.random.normal(jax.random.key(9), (2, h), jnp.bfloat16) / 4
    return tuple(scales) if case[-1].get("norms") else None


def by_xla(case, qkv, rope, cache, visible):
    b, _, _, g, h, _, offset, options = case
    norms = norms_of(case)
    if norms is not None:

        def norm(heads, scale):
            flat = inspect.unwrap(rms_norm)(heads.reshape(b, -1, h), scale, jnp.float32(EPSILON))
            return flat.reshape(heads.shape)

        parts = norm(qkv[..., :g, :], norms[0]), norm(qkv[..., g : g + 1, :], norms[1])
        qkv = jnp.concatenate([*parts, qkv[..., g + 1 :, :]], axis=3)
    queries, keys, values = inspect.unwrap(rotate_heads)(qkv, *rope)
    cache = cache.write(keys, values, offset)
    layers = cache.keys[0], cache.values[0]
    return attend_capped(queries, *layers, visible, options.get("cap")), *layers


def by_kernels(case, qkv, rope, cache, visible):
    h, offset, options = case[4], case[6], case[7]
    how = {"norms": norms_of(case), "epsilon": EPSILON, "cap": options.get("cap")}
    layers = cache.keys[0], cache.values[0]
    start = cache.length + offset
    return attend_block(qkv, rope, start, visible, *layers, scale=h**-0.5, **how)


def compiled(case, function, monkeypatch):
    if "splits" in case[-1]:
        monkeypatch.setattr(block_attention, "_MOST_SPLITS", case[-1]["splits"])
    return jax.jit(lambda *operands: function(case, *operands))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_says_what_xla_says(case, monkeypatch):
    """Random trees and lengths, windows, caps and norms; caches are equal but for roundings."""
    run, expect = (compiled(case, each, monkeypatch) for each in (by_kernels, by_xla))
    for seed in range(4):
        operands = make_block(case, seed)
        mixed, *caches = run(*operands)
        expected, *expected_caches = expect(*operands)
        distance = jnp.linalg.norm(mixed.astype(jnp.float32) - expected, axis=-1)
        assert (distance < 0.01 * jnp.linalg.norm(expected, axis=-1) + 1e-3).all()
        for found, wanted in zip(caches, expected_caches, strict=True):
            found, wanted = found.astype(jnp.float32), wanted.astype(jnp.float32)
            np.testing.assert_allclose(found, wanted, rtol=0.01, atol=1e-6)


def test_only_committed_slots_and_the_block_are_read(monkeypatch):
    """What earlier blocks have left in other slots is not even multiplied by zero."""
    case = CASES[1]
    run = compiled(case, by_kernels, monkeypatch)
    qkv, rope, cache, visible = make_block(case, 0)
    expected = run(qkv, rope, cache, visible)
    is_dead = jnp.arange(cache.capacity + TAIL) >= cache.length[:, None]

    def spoil(layer):
        return jnp.where(is_dead[:, None, :, None], jnp.asarray(jnp.nan, layer.dtype), layer)

    spoiled = cache.replace(keys=(spoil(cache.keys[0]),), values=(spoil(cache.values[0]),))
    is_after = jnp.arange(cache.capacity + TAIL) >= cache.length[:, None] + case[1]
    mixed, keys, _ = run(qkv, rope, spoiled, visible | is_after[:, None])
    np.testing.assert_array_equal(mixed, expected[0])
    for row, length in enumerate(cache.length):
        own = slice(int(length), int(length) + case[1])
        np.testing.assert_array_equal(keys[row, :, own], expected[1][row, :, own])


def test_a_query_that_sees_nothing_gives_no_nan(monkeypatch):
    case = CASES[1]
    qkv, rope, cache, visible = make_block(case, 0)
    run = compiled(case, by_kernels, monkeypatch)
    mixed, *_ = run(qkv, rope, cache, jnp.zeros_like(visible))
    assert jnp.isfinite(mixed).all()


def test_a_token_alone_gives_what_it_gives_in_a_block_of_a_batch(monkeypatch):
    """Bit for bit: a chain of five tokens at once, and one after another without the other row."""
    case = (2, 5, 2, 3, 32, 120, 0, {})
    qkv, rope, cache, _ = make_block(case, 0)
    chain = cache.visible(jnp.tril(jnp.ones([1, 5, 5], bool)))
    together, keys, values = compiled(case, by_kernels, monkeypatch)(qkv, rope, cache, chain)
    own = jax.tree.map(lambda leaf: leaf[1:], cache)
    alone = compiled((1, 1, *case[2:]), by_kernels, monkeypatch)
    for token in range(5):
        step = slice(token, token + 1)
        angles = tuple(part[1:, step] for part in rope)
        sees = own.visible(jnp.ones([1, 1, 1], bool))
        mixed, *layers = alone(qkv[1:, step], angles, own, sees)
        np.testing.assert_array_equal(mixed, together[1:, step])
        own = KVCache((layers[0],), (layers[1],), own.length + 1)
    np.testing.assert_array_equal(own.keys[0], keys[1:])
    np.testing.assert_array_equal(own.values[0], values[1:])


@pytest.mark.parametrize(
    ("num_heads", "num_slots", "expected"),
    [(8, 1040, 16), (8, 32_784, 32), (64, 8208, 4), (512, 1040, 1), (8, 64, 1), (2, 200, 4)],
)
def test_splits_are_as_many_as_keep_a_device_busy(num_heads, num_slots, expected):
    """Each writes floats that are read again; none is left without a tile."""
    assert block_attention.num_splits(num_heads, num_slots) == expected

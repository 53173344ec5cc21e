"""Attention of a block in CUDA C++ says what float64 says, at every width, in any order."""

import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.kernels import PAGE
from jspec.kernels.cuda_block import attend, num_splits
from jspec.models.cache import TAIL, KVCache, PagedKVCache
from tests.cases import slow_unless
from tests.kernels.families import CONFIG, random_tree

EPSILON = 0.1


class Case(NamedTuple):
    """A call: its sizes, what it has besides, and how it is made.

    Attributes:
      b: rows, of different lengths.
      t: tokens of a row.
      k: key heads.
      g: query heads of each key head.
      h: width of a head.
      slots: of a row, without the tail.
      offset: slots of the block that earlier calls have written.
      kind: of mask, "chain" or "tree".
      window: tokens that a token sees.
      cap: of the scores.
      has_norms: of queries and keys.
      has_pages: whether the cache is paged.
      lengths: committed slots; None for random ones.
    """

    b: int
    t: int
    k: int
    g: int
    h: int
    slots: int
    offset: int = 0
    kind: str = "tree"
    window: int | None = None
    cap: float | None = None
    has_norms: bool = False
    has_pages: bool = False
    lengths: tuple[int, ...] | None = None

    @property
    def config(self):
        sizes = {"num_heads": self.k * self.g, "num_kv_heads": self.k, "head_dim": self.h}
        options = {"attention_softcap": self.cap, "norm_epsilon": EPSILON}
        return dataclasses.replace(CONFIG, **sizes, **options)


CASES = [
    (True, Case(1, 1, 2, 1, 32, 40, kind="chain")),
    (True, Case(3, 5, 2, 3, 64, 150, has_norms=True)),
    (True, Case(2, 4, 1, 5, 96, 230, cap=0.8, lengths=(61, 226))),
    (True, Case(2, 16, 1, 2, 32, 128, lengths=(120, 3))),  # into the tail
    (True, Case(2, 3, 2, 2, 32, 192, offset=2, window=20)),
    (True, Case(1, 2, 1, 1, 256, 60, has_norms=True)),
    (True, Case(3, 5, 1, 4, 64, 192, has_pages=True, lengths=(187, 62, 0))),
    (True, Case(1, 16, 1, 8, 128, 64, has_pages=True, lengths=(56,))),  # past the end
    (False, Case(2, 16, 2, 8, 128, 256, has_norms=True, has_pages=True)),
    (False, Case(1, 6, 1, 7, 224, 150)),
    (False, Case(2, 16, 1, 6, 160, 128, cap=2.0, lengths=(112, 128))),
    (False, Case(1, 5, 1, 2, 192, 3000, kind="chain", window=100)),
    (False, Case(3, 9, 2, 4, 64, 1100, has_norms=True, cap=1.0, has_pages=False)),
]


def bfloat16(rng, *shape):
    return rng.normal(size=shape).astype(jnp.bfloat16)


def make_call(case, seed=0):
    """Returns qkv, angles, what is visible, a cache and norms; slots that no token sees are NaN."""
    b, t, k, g, h, slots, offset = case[:7]
    rng = np.random.default_rng(seed)
    qkv = rng.normal(size=(b, t, k, g + 2, h)).astype(np.float32)
    angles = rng.normal(size=(b, t, h // 2))
    rope = tuple(part(angles).astype(np.float32) for part in (np.cos, np.sin))
    length = np.array(case.lengths or rng.integers(0, slots - t - offset + 1, b), np.int32)
    num_slots = slots if case.has_pages else slots + TAIL
    layers = [bfloat16(rng, b, k, num_slots, h) for _ in range(2)]
    cache = KVCache((layers[0],), (layers[1],), length)
    chain = np.tril(np.ones([t + offset] * 2, bool))
    trees = [chain if case.kind == "chain" else random_tree(rng, t + offset) for _ in range(b)]
    visible = visible_slots(cache, np.stack(trees)[:, offset:], case.window)
    is_read = visible.any(axis=1) & (np.arange(num_slots) < length[:, None] + offset)
    for layer in layers:
        layer[np.broadcast_to(~is_read[:, None, :, None], layer.shape)] = np.nan
    if case.has_pages:
        cache = in_pages(layers, length, rng)
    norms = (
        tuple((1 + rng.normal(size=(2, h)) / 4).astype(jnp.bfloat16)) if case.has_norms else None
    )
    return qkv, rope, visible, cache, norms


@functools.partial(jax.jit, static_argnums=2)
def visible_slots_of(cache, mask, window):
    return cache.visible(mask, window)


def visible_slots(*operands):
    return np.asarray(visible_slots_of(*operands))


def in_pages(layers, length, rng):
    """Returns a paged cache of the same slots, in pages from 1 on, in random order; 0 is NaN."""
    b, k, s, h = layers[0].shape
    m = s // PAGE
    table = (1 + rng.permutation(b * m).reshape(b, m)).astype(np.int32)

    def lay_out(layer):
        pages = layer.reshape(b, k, m, PAGE, h).transpose(0, 2, 1, 3, 4)
        result = np.full((b * m + 1, k, PAGE, h), np.nan, layer.dtype)
        result[table] = pages
        return result

    keys, values = map(lay_out, layers)
    return PagedKVCache(keys=(keys,), values=(values,), length=length, table=table)


def slots_of(cache):
    layers = [np.asarray(layer) for layer in (cache.keys[0], cache.values[0])]
    if hasattr(cache, "table"):
        b, m = cache.table.shape
        layers = [layer[np.asarray(cache.table)].transpose(0, 2, 1, 3, 4) for layer in layers]
        layers = [layer.reshape(b, layer.shape[1], m * PAGE, -1) for layer in layers]
    return [np.array(layer, np.float64) for layer in layers]


def run(case, qkv, rope, visible, cache, norms):
    return compiled(case.config, case.offset)(qkv, rope, visible, cache, norms)


@functools.cache
def compiled(config, offset):
    return jax.jit(lambda *operands: attend(config, *operands[:4], offset, operands[4]))


def by_numpy(case, qkv, rope, visible, cache, norms):
    _, t, _, g, h, *_ = case
    qkv, visible = np.asarray(qkv, np.float64), np.array(visible)
    cos, sin = (np.asarray(part, np.float64)[:, :, None, None] for part in rope)

    def prepare(heads, which):
        if norms is not None:
            mean_square = (heads**2).mean(axis=-1, keepdims=True)
            heads = heads / np.sqrt(mean_square + EPSILON) * np.asarray(norms[which], np.float64)
        first, second = np.split(heads, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    queries = prepare(qkv[..., :g, :], 0) / math.sqrt(h)
    new = prepare(qkv[..., g : g + 1, :], 1)[..., 0, :], qkv[..., g + 1, :]
    keys, values = slots_of(cache)
    num_slots, mixed = keys.shape[2], np.zeros((*qkv.shape[:3], g, h))
    for row, start in enumerate(np.asarray(cache.length) + case.offset):
        slots = np.arange(start, min(start + t, num_slots))
        keys[row, :, slots], values[row, :, slots] = (part[row, : len(slots)] for part in new)
        visible[row, :, start + t :] = False
        for token, head in itertools.product(range(t), range(case.k)):
            seen = visible[row, token]
            if not seen.any():
                continue
            scores = queries[row, token, head] @ keys[row, head, seen].T
            scores = scores if case.cap is None else case.cap * np.tanh(scores / case.cap)
            probs = np.exp(scores - scores.max(axis=1, keepdims=True))
            probs /= probs.sum(axis=1, keepdims=True)
            mixed[row, token, head] = probs @ values[row, head, seen]
    return mixed.reshape(*qkv.shape[:2], -1, h), keys, values


def assert_equal(results, expected):
    """Compares two trees of arrays bit for bit; in NumPy's floats, so that NaN equals NaN."""
    for result, wanted in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(*(np.asarray(leaf, np.float32) for leaf in (result, wanted)))


@pytest.mark.parametrize("case", [slow_unless(*case) for case in CASES], ids=str)
@pytest.mark.parametrize("seed", [0, slow_unless(False, 1)])
def test_it_says_what_float64_says(emulator, case, seed):
    """The mixed values, and the caches but for roundings: slots that no token sees are NaN as they
    were, and what the kernel does not write is NaN, too.
    """
    call = make_call(case, seed)
    mixed, cache = run(case, *call)
    expected, *layers = by_numpy(case, *call)
    distance = np.linalg.norm(np.asarray(mixed, np.float64) - expected, axis=-1)
    assert (distance < 0.01 * np.linalg.norm(expected, axis=-1) + 1e-3).all()
    for result, layer in zip(slots_of(cache), layers, strict=True):
        np.testing.assert_allclose(result, layer, rtol=0.01, atol=0.01)
    if case.has_pages:
        assert np.isnan(np.asarray(cache.keys[0][0])).all()  # nobody's


def test_slots_after_the_block_are_not_seen_whatever_is_said(emulator):
    case = CASES[1][1]
    qkv, rope, visible, cache, norms = make_call(case)
    is_after = np.arange(visible.shape[2]) >= cache.length[:, None] + case.t
    expected, _ = run(case, qkv, rope, visible, cache, norms)
    mixed, _ = run(case, qkv, rope, visible | is_after[:, None], cache, norms)
    assert_equal(mixed, expected)


def test_a_row_without_pages_writes_nothing(emulator):
    """Its table names page 0, which is nobody's; what it attends to is its own block."""
    case = CASES[6][1]
    qkv, rope, visible, cache, norms = make_call(case)
    table = cache.table.copy()
    table[2] = 0
    mixed, written = run(case, qkv, rope, visible, cache.replace(table=table), norms)
    expected, _ = run(case, qkv, rope, visible, cache, norms)
    assert cache.length[2] == 0
    assert_equal(mixed, expected)
    assert np.isnan(np.asarray(written.keys[0][0], np.float32)).all()


def test_a_token_that_sees_nothing_gives_no_nan(emulator):
    case = CASES[1][1]
    qkv, rope, visible, cache, norms = make_call(case)
    expected, _ = run(case, qkv, rope, visible, cache, norms)
    blind = visible.copy()
    blind[:, 1] = False
    mixed, _ = run(case, qkv, rope, blind, cache, norms)
    assert np.isfinite(np.asarray(mixed, np.float32)).all()
    assert_equal(mixed[:, 2:], expected[:, 2:])


@pytest.mark.parametrize("has_pages", [False, True])
def test_a_token_gives_the_same_bits_at_every_width(emulator, has_pages):
    """A chain of 16 tokens at once, as 5 and 5 and 6, and one after another; over two tiles."""
    case = Case(2, 16, 1, 4, 64, 192, kind="chain", has_pages=has_pages, lengths=(123, 55))
    qkv, rope, _, cache, norms = make_call(case)

    def in_blocks(*widths):
        state, results, first = cache, [], 0
        for width in widths:
            step = slice(first, first + width)
            visible = visible_slots(state, np.tril(np.ones([1, width, width], bool)), None)
            angles = tuple(part[:, step] for part in rope)
            mixed, state = run(case, qkv[:, step], angles, visible, state, norms)
            state = state.rollback(state.length + width)
            results.append(mixed)
            first += width
        return jnp.concatenate(results, axis=1), state

    expected = in_blocks(16)
    for widths in [(5, 5, 6), (1,) * 16]:
        assert_equal(in_blocks(*widths), expected)


@pytest.mark.parametrize("case", [CASES[1][1], CASES[7][1]], ids=str)
def test_the_order_of_threads_is_irrelevant(emulator, in_order, case):
    call = make_call(case)
    expected = run(case, *call)
    for order in (1, 2, 3):
        with in_order(order):
            assert_equal(run(case, *call), expected)


def test_missing_barriers_are_noticed(emulator, in_order, monkeypatch):
    """The negative control: threads read what no thread has written yet, which is NaN."""
    name, ffi_call = "jspec_cuda_broken_attention", jax.ffi.ffi_call
    handler = jax.ffi.pycapsule(getattr(emulator, f"emulated_{name}"))
    jax.ffi.register_ffi_target(name, handler, platform="cpu")
    monkeypatch.setattr(
        jax.ffi, "ffi_call", lambda _, *results, **how: ffi_call(name, *results, **how)
    )
    case = CASES[1][1]
    qkv, rope, visible, cache, norms = make_call(case)
    broken = compiled.__wrapped__(case.config, case.offset)
    for order in range(4):
        with in_order(order):
            mixed, _ = broken(qkv, rope, visible, cache, norms)
        assert np.isnan(np.asarray(mixed, np.float32)).any()


@pytest.mark.parametrize(
    ("num_heads", "num_slots", "expected"),
    [(8, 1040, 16), (8, 32_784, 32), (64, 8208, 4), (512, 1040, 1), (8, 64, 1), (2, 200, 4)],
)
def test_splits_are_as_many_as_keep_a_device_busy(num_heads, num_slots, expected):
    """Each writes floats that are read again; none is left without a tile."""
    assert num_splits(num_heads, num_slots) == expected

"""Attention of a block of few tokens: rotation, cache write, scores and mixing in two kernels.

    slots     0 .. 63 | 64 .. 127 | 128 .. 191 | 192 .. 255 | 256 ..      tiles of 64
    split     0       | 1         | 0          | 1          | 0           two splits
    holds     committed slots, and earlier ones of the block  | the block's, in one or two tiles

Each program of the first kernel goes through the tiles of its split by an online softmax (arXiv
1805.02867). The tile in which a slot of the block lies takes its key and its value from the
products instead of the cache, rotates the key and writes both. So no program waits for another, and
each query adds the slots in the same order whatever the number of tokens in its block: a token's
result is the same in a decoding step and in a verify call. The second kernel adds up the splits.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Float32, Int32

from jspec.kernels.gpu.launch import TILE, launch, load_floats, power_of_two

_SLOTS = 64  # of a tile
_MOST_SPLITS = 32
_PROGRAMS = 256  # twice the cores of the largest GPUs
_MASKED = -1e30  # finite, so that a query that may see nothing gives no NaN


def attend_block(
    qkv: Float32[Array, "b t k p h"],
    rope: tuple[Float32[Array, "b t half"], Float32[Array, "b t half"]],
    start: Int32[Array, "b"],
    visible: Bool[Array, "b t s"],
    keys: Float[Array, "b k s h"],
    values: Float[Array, "b k s h"],
    *,
    norms: tuple[Float[Array, "h"], Float[Array, "h"]] | None = None,
    epsilon: float = 0.0,
    scale: float,
    cap: float | None = None,
) -> tuple[Float[Array, "b t n h"], Float[Array, "b k s h"], Float[Array, "b k s h"]]:
    """Writes a block's keys and values and attends; returns the mixed values and the caches.

    Args:
      qkv: the products; p heads for each key/value head, as in `kernels.rotate_heads`.
      rope: cosines and sines of every token's angles.
      start: the block's first slot, of each row. Slots that are not there are not written.
      visible: which slots a query sees; none after the block's, whatever it says.
      keys: one layer's cache, in bfloat16. Its memory is taken over.
      values: the same.
      norms: scales of RMSNorms of each query head and of each key head, before the rotation.
      epsilon: of these norms.
      scale: of the scores.
      cap: c of c · tanh(scores / c).
    """
    b, t, k, p, h = qkv.shape
    s, g = keys.shape[2], p - 2
    splits = num_splits(b * k, s)
    shape = (b, k, t * g, splits)
    floats = [jax.ShapeDtypeStruct(size, jnp.float32) for size in ((*shape, h), shape, shape)]
    caches = [jax.ShapeDtypeStruct(keys.shape, keys.dtype)] * 2
    query_norm, key_norm = norms or (None, None)
    keys, values, *parts = launch(
        _attend_split, (*caches, *floats), (splits, -(-t * g // TILE), b * k),
        keys, values, qkv, *rope, start, visible, query_norm, key_norm,
        in_place={0: 0, 1: 1}, epsilon=epsilon, scale=scale, cap=cap,
    )  # fmt: skip
    mixed = jax.ShapeDtypeStruct((b, t, k * g, h), keys.dtype)
    return launch(_add_splits, mixed, (t * g, b * k), *parts, start, s=s), keys, values


def num_splits(num_heads: int, num_slots: int) -> int:
    """Returns the splits of each row's key heads, a power of two.

    Each split writes a partial result that is read again, so there are only as many as keep a
    device busy. They depend on the batch, not on the block.
    """
    wanted = power_of_two(-(-_PROGRAMS // num_heads))
    tiles = -(-num_slots // _SLOTS)
    return min(_MOST_SPLITS, wanted, power_of_two(tiles + 1) // 2)


def _attend_split(
    old_keys: Any, old_values: Any, qkv_ref: Any, cos_ref: Any, sin_ref: Any, start_ref: Any,
    visible_ref: Any, query_norm: Any, key_norm: Any, keys_ref: Any, values_ref: Any,
    mixed_ref: Any, most_ref: Any, total_ref: Any, *,
    epsilon: float, scale: float, cap: float | None,
) -> None:  # fmt: skip
    """Mixes the values of one split's slots for a tile of the queries that share a key head."""
    del old_keys, old_values  # the same memory as the results
    _, t, k, parts, h = qkv_ref.shape
    s, g, half, dtype = keys_ref.shape[2], parts - 2, h // 2, keys_ref.dtype
    split, splits, tile = pl.program_id(0), mixed_ref.shape[3], pl.program_id(1)
    row, head = pl.program_id(2) // k, pl.program_id(2) % k
    start = triton.load(start_ref.at[row])
    pairs = jnp.arange(power_of_two(half))[None, :]
    dims = jnp.arange(power_of_two(h))[None, :]
    is_pair, is_dim = pairs < half, dims < h

    def rotate(tokens: Array, part: Array | int, mask: Array, norm_ref: Any) -> list[Array]:
        heads = [qkv_ref.at[row, tokens, head, part, first + pairs] for first in (0, half)]
        angles = [ref.at[row, tokens, pairs] for ref in (cos_ref, sin_ref)]
        norm = None
        if norm_ref is not None:
            norm = [norm_ref.at[jnp.minimum(first + pairs, h - 1)] for first in (0, half)]
        return _rotate(heads, angles, norm, mask & is_pair, h, epsilon)

    query = tile * TILE + jnp.arange(TILE)[:, None]
    token, is_query = query // g, query < t * g
    queries = rotate(token, query % g, is_query, query_norm)
    queries = [(part * scale).astype(dtype) for part in queries]

    def add_tile(turn: Any, carry: Any) -> Any:
        mixed, most, total = carry
        first_slot = (turn * splits + split) * _SLOTS
        slots = first_slot + jnp.arange(_SLOTS)[:, None]
        new = slots - start
        is_old, is_new = (new < 0) & (slots < s), (new >= 0) & (new < t) & (slots < s)

        def merge(layer: Any, own: Array, dims: Array, is_dim: Array) -> Array:
            # The programs of other tiles of queries would write the same.
            place, is_writer = layer.at[row, head, slots, dims], tile == 0
            return _merge(place, own.astype(dtype), is_old & is_dim, is_new & is_dim, is_writer)

        scores = jnp.zeros([TILE, _SLOTS], jnp.float32)
        for part, own in enumerate(rotate(new, g, is_new, key_norm)):
            own = merge(keys_ref, own, part * half + pairs, is_pair)
            scores += triton.dot(queries[part], own, trans_b=True)
        if cap is not None:
            scores = cap * jnp.tanh(scores / cap)
        own = load_floats(qkv_ref.at[row, new, head, g + 1, dims], is_new & is_dim)
        own = merge(values_ref, own, dims, is_dim)
        slots = first_slot + jnp.arange(_SLOTS)[None, :]
        may_see = is_query & (slots < jnp.minimum(start + t, s))
        seen = triton.load(visible_ref.at[row, token, slots], mask=may_see, other=False)
        scores = jnp.where(seen, scores, _MASKED)
        now = jnp.maximum(most, jnp.max(scores, axis=1, keepdims=True))
        probs = jnp.where(seen, jnp.exp(scores - now), 0.0)
        factor = jnp.exp(most - now)
        total = total * factor + jnp.sum(probs, axis=1, keepdims=True)
        return mixed * factor + triton.dot(probs.astype(dtype), own), now, total

    empty = jnp.zeros([TILE, power_of_two(h)]), jnp.full([TILE, 1], _MASKED), jnp.zeros([TILE, 1])
    turns = jax.lax.div(_num_tiles(start, t, s) - split + splits - 1, splits)
    mixed, most, total = jax.lax.fori_loop(0, turns, add_tile, empty)
    place = (row, head, query)
    triton.store(mixed_ref.at[*place, split, dims], mixed, mask=is_query & is_dim & (turns > 0))
    triton.store(most_ref.at[*place, split], most, mask=is_query & (turns > 0))
    triton.store(total_ref.at[*place, split], total, mask=is_query & (turns > 0))


def _rotate(
    heads: list[Any], angles: list[Any], norm: list[Any] | None, mask: Array, h: int, epsilon: float
) -> list[Array]:
    """Returns both halves of heads, normed and rotated, and zeros where the mask is not."""
    first, second = (load_floats(half, mask) for half in heads)
    if norm is not None:
        squares = jnp.sum(first * first + second * second, axis=1, keepdims=True)
        factors = jax.lax.rsqrt(squares / h + epsilon)
        scales = [triton.load(each).astype(jnp.float32) for each in norm]
        first, second = first * factors * scales[0], second * factors * scales[1]
    cos, sin = (load_floats(each, mask) for each in angles)
    return [first * cos - second * sin, second * cos + first * sin]


def _merge(place: Any, own: Array, is_old: Array, is_new: Array, is_writer: Array) -> Array:
    """Returns a tile of the cache with the block's own slots, after writing these."""
    old = triton.load(place, mask=is_old, other=0.0)
    merged = jnp.where(is_new, own, old)
    triton.store(place, merged, mask=is_new & is_writer)
    return merged


def _add_splits(
    mixed_ref: Any, most_ref: Any, total_ref: Any, start_ref: Any, result_ref: Any, *, s: int
) -> None:
    """Adds up what the splits have mixed for one query."""
    _, k, _, splits, h = mixed_ref.shape
    _, t, n, _ = result_ref.shape
    g = n // k
    query, row, head = pl.program_id(0), pl.program_id(1) // k, pl.program_id(1) % k
    start = triton.load(start_ref.at[row])
    split = jnp.arange(splits)[:, None]
    dims = jnp.arange(power_of_two(h))[None, :]
    is_live = split < _num_tiles(start, t, s)  # what the others hold was never written
    most = triton.load(most_ref.at[row, head, query, split], mask=is_live, other=_MASKED)
    weights = jnp.exp(most - jnp.max(most))
    total = load_floats(total_ref.at[row, head, query, split], is_live)
    mixed = load_floats(mixed_ref.at[row, head, query, split, dims], is_live & (dims < h))
    mixed = jnp.sum(mixed * weights, axis=0) / jnp.maximum(jnp.sum(total * weights), 1e-30)
    dims = jnp.arange(power_of_two(h))
    place = result_ref.at[row, query // g, head * g + query % g, dims]
    triton.store(place, mixed.astype(result_ref.dtype), mask=dims < h)


def _num_tiles(start: Array, t: int, s: int) -> Array:
    """Returns how many tiles of slots hold something that a query may see."""
    return jax.lax.div(jnp.minimum(start + t, s) + _SLOTS - 1, _SLOTS)

"""Attending to the slots of a cache, and writing a block there."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jspec.common.typing import RowCounts
from jspec.kernels import library
from jspec.kernels.backend import backend, exact_float32, pinned
from jspec.kernels.cudnn import in_cudnn
from jspec.kernels.library import in_cpp

_NATIVE_DIMS = (32, 64, 128, 256)  # widths of a head that the C++ computes
_MASKED = -1e30  # finite, so that a query that may see nothing gives no NaN


def takes_queries(queries: Array, keys: Array, *others: Array) -> bool:
    """Returns whether the C++ attends, from the shapes and types of queries and keys.

    XLA computes all slots of the cache, whatever the length of the text. With 64 queries it takes
    up to 25 times as long as the C++; only where the cache is full it may be a fifth faster.
    """
    del others
    has_types = queries.dtype == jnp.float32 and keys.dtype in (jnp.bfloat16, jnp.float32)
    return queries.shape[3] in _NATIVE_DIMS and has_types


def reads_rows_in_place(head_dim: int) -> bool:
    """Returns whether queries of any rows, side by side, read these rows' slots without a copy."""
    return backend() == "cpu" and head_dim in _NATIVE_DIMS and library.is_available()


@in_cudnn
@library.in_cpp("attention", lambda queries, *_: library.floats(*queries.shape), takes_queries)
def attend(
    queries: Float[Array, "b t n h"],
    keys: Float[Array, "b k s h"],
    values: Float[Array, "b k s h"],
    visible: Bool[Array, "b t s"],
) -> Float[Array, "b t n h"]:
    """Returns softmax(queries · keysᵀ) · values over the visible slots, heads in groups of n / k.

    Queries are already scaled. Scores and softmax are float32. For a query that sees nothing the
    result is finite and means nothing.
    """
    return attend_capped(queries, keys, values, visible, None)


def attend_capped(
    queries: Float[Array, "b t n h"],
    keys: Float[Array, "b k s h"],
    values: Float[Array, "b k s h"],
    visible: Bool[Array, "b t s"],
    cap: float | None,
    bias: Float[Array, "#b n t s"] | None = None,
) -> Float[Array, "b t n h"]:
    """Returns the same with scores of cap · tanh(scores / cap), unless cap is None; in JAX.

    A bias is added to the scores.
    """
    b, t, n, h = queries.shape
    k = keys.shape[1]
    # The n / k query heads that share a key head become more queries of that head: one product.
    grouped = queries.reshape(b, t, k, n // k, h).transpose(0, 2, 1, 3, 4)
    grouped = grouped.reshape(b, k, t * (n // k), h).astype(keys.dtype)
    multiply = functools.partial(
        jnp.einsum, precision=exact_float32(keys.dtype), preferred_element_type=jnp.float32
    )
    scores = multiply("bkqh,bksh->bkqs", grouped, keys)
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    if bias is not None:
        by_group = bias.reshape(bias.shape[0], k, n // k, t, -1).transpose(0, 1, 3, 2, 4)
        scores += by_group.reshape(bias.shape[0], k, t * (n // k), -1)
    mask = jnp.repeat(visible, n // k, axis=1)[:, None]
    probs = jax.nn.softmax(jnp.where(mask, scores, _MASKED), axis=-1)
    mixed = multiply("bkqs,bksh->bkqh", probs.astype(values.dtype), values)
    mixed = mixed.reshape(b, k, t, n // k, h).transpose(0, 2, 1, 3, 4)
    return mixed.reshape(b, t, n, h).astype(queries.dtype)


TAIL = 16  # slots after the capacity, so that a small block written at its end stays inside


def takes_block(layer: Array, new: Array, *_: Array) -> bool:
    """Returns whether the C++ writes, from the types of layer and block."""
    return layer.dtype in (jnp.bfloat16, jnp.float32) and new.dtype == jnp.float32


@in_cpp("write_rows", lambda layer, *_: jax.ShapeDtypeStruct(layer.shape, layer.dtype), takes_block)
def write_rows(
    layer: Float[Array, "b k s h"], new: Float[Array, "b t k h"], start: RowCounts
) -> Float[Array, "b k s h"]:
    """Returns the layer with `new` written from each row's own slot on, in place where possible.

    What falls past the last slot is lost. It is never shifted onto a good slot. A layer has `TAIL`
    slots more than its capacity, whose contents mean nothing.
    """
    new = new.astype(layer.dtype)
    b, t = new.shape[:2]
    is_wide, is_tpu = t > TAIL, backend() == "tpu"
    # One row's block is written in place everywhere. Those of several rows take a loop, which is
    # slow on a GPU; a scatter is slow on a TPU, which copies the layer for it.
    if (is_wide and not (is_tpu and t <= layer.shape[2])) or (b > 1 and backend() == "gpu"):
        rows, slots = jnp.arange(b)[:, None], start[:, None] + jnp.arange(t)
        return layer.at[rows, :, slots].set(new, mode="drop")  # drops what falls outside
    # For a scatter XLA on CPU converts a whole bfloat16 layer to float32; a dynamic_update_slice is
    # done in place. But it shifts a write that would pass the end back onto good slots. So the
    # write begins at the capacity at the latest, and the tail has space for the block.
    new, begin = new.transpose(0, 2, 1, 3), jnp.minimum(start, layer.shape[2] - max(t, TAIL))

    def write(turn: Array | int, layer: Array) -> Array:
        row = b - 1 - turn  # from the last: from the first, libtpu fails to simplify the loop
        block, place = jax.lax.dynamic_slice_in_dim(new, row, 1), (row, 0, begin[row], 0)
        if is_wide:  # the tail has no space: before a block that was moved stands what stood there
            moved, old = start[row] - begin[row], jax.lax.dynamic_slice(layer, place, block.shape)
            is_own = jnp.arange(t)[:, None] >= moved
            block = jnp.where(is_own, jnp.roll(block, moved, axis=2), old)
        return pinned(jax.lax.dynamic_update_slice(layer, block, place))

    # A loop, because XLA fuses a chain of updates into one that passes over the whole layer for
    # every row.
    return write(0, layer) if b == 1 else jax.lax.fori_loop(0, b, write, layer)

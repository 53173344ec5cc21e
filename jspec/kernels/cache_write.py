"""Writing a block of keys or values into one layer of a cache."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.common.typing import RowCounts
from jspec.kernels.backend import backend, pinned
from jspec.kernels.library import in_cpp

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

"""A layer of a cache in pages: a table says which page holds each next `PAGE` slots of a row.

    table of a row     3     0     7          pages that are not named here are other rows', or free
    its slots          0 ..  64 .. 128 ..

On CPU the C++ reads and writes through the table. Elsewhere XLA gathers a row's pages first.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jspec.common.typing import RowCounts
from jspec.kernels import library
from jspec.kernels.attention import attend, attend_capped, takes_block, takes_queries
from jspec.kernels.product import CHUNK

PAGE = CHUNK  # slots of a page; what texts share are whole ones


@library.in_cpp("attend_pages", lambda queries, *_: library.floats(*queries.shape), takes_queries)
def attend_pages(
    queries: Float[Array, "b t n h"],
    keys: Float[Array, "p k page h"],
    values: Float[Array, "p k page h"],
    visible: Bool[Array, "b t s"],
    table: Int32[Array, "b m"],
) -> Float[Array, "b t n h"]:
    """Returns what `attend` returns for the rows' pages in order, bit for bit; s is m pages."""
    return attend_gathered(queries, keys, values, visible, table, None)


def attend_gathered(
    queries: Float[Array, "b t n h"],
    keys: Float[Array, "p k page h"],
    values: Float[Array, "p k page h"],
    visible: Bool[Array, "b t s"],
    table: Int32[Array, "b m"],
    cap: float | None,
) -> Float[Array, "b t n h"]:
    """Returns the same with scores as in `attend_capped`; the pages are copied first."""
    keys, values = gather(keys, table), gather(values, table)
    # A page may hold anything from its last owner, even NaN, and 0 · NaN is NaN.
    values = jnp.where(visible.any(axis=1)[:, None, :, None], values, 0)
    if cap is None:
        return attend(queries, keys, values, visible)
    return attend_capped(queries, keys, values, visible, cap)


def gather(layer: Float[Array, "p k page h"], table: Int32[Array, "b m"]) -> Array:
    """Returns the rows' slots in order, [b k s h]."""
    b, m = table.shape
    _, k, page, h = layer.shape
    return layer[table].transpose(0, 2, 1, 3, 4).reshape(b, k, m * page, h)


@library.in_cpp(
    "write_pages", lambda layer, *_: jax.ShapeDtypeStruct(layer.shape, layer.dtype), takes_block
)
def write_pages(
    layer: Float[Array, "p k page h"],
    new: Float[Array, "b t k h"],
    start: RowCounts,
    table: Int32[Array, "b m"],
) -> Float[Array, "p k page h"]:
    """Returns the layer with `new` written from each row's own slot on, in place where possible.

    What falls past a row's last slot is lost.
    """
    size, slots = layer.shape[2], start[:, None] + jnp.arange(new.shape[1])
    pages = jnp.take_along_axis(table, slots // size, axis=1, mode="clip")
    # No such page: dropped.
    pages = jnp.where(slots < table.shape[1] * size, pages, layer.shape[0])
    return layer.at[pages, :, slots % size].set(new.astype(layer.dtype), mode="drop")

"""A KV cache in pages: rows take as much memory as they have tokens, and may share beginnings.

Pages are numbered from 1. Page 0 is nobody's: a row's table names it where there is no page, and
what rows without pages write goes there. Tables come from the host, and stay as they are during a
program: whoever runs it gives a row all pages that it may write before.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from jspec.common.memory import tree_bytes
from jspec.common.typing import RowCounts
from jspec.kernels import PAGE, attend_gathered, attend_pages, write_pages
from jspec.models.cache import KVCache


class PagedKVCache(KVCache, kw_only=True):
    """A cache whose layers are pages, which other caches' rows may have, too.

    Attributes:
      keys: one array [p k page h] a layer; none while the layers are kept elsewhere.
      values: the same.
      length: committed slots, [b].
      table: the pages of each row, in the order of its slots, [b m].
    """

    keys: tuple[Float[Array, "p k page h"], ...]
    values: tuple[Float[Array, "p k page h"], ...]
    length: RowCounts
    table: Int32[Array, "b m"]

    @property
    def num_slots(self) -> int:
        """Slots of a row, were all its pages there."""
        return self.table.shape[1] * PAGE

    @property
    def capacity(self) -> int:
        """The same: a block that is written at the end needs no room."""
        return self.num_slots

    def attend(
        self,
        queries: Float[Array, "b t n h"],
        visible: Bool[Array, "b t s"],
        softcap: float | None = None,
    ) -> Float[Array, "b t n h"]:
        """Returns the attention over the visible slots of a one-layer cache."""
        (keys,), (values,) = self.keys, self.values
        if softcap is not None:
            return attend_gathered(queries, keys, values, visible, self.table, softcap)
        return attend_pages(queries, keys, values, visible, self.table)

    def _put(self, layer: Array, new: Float[Array, "b t k h"], start: RowCounts) -> Array:
        return write_pages(layer, new, start, self.table)

    def _take(self, layer: Array, slots: Int32[Array, "b p"]) -> Float[Array, "b p k h"]:
        pages = jnp.take_along_axis(self.table, slots // PAGE, axis=1, mode="clip")
        return layer[pages, :, slots % PAGE]


Layers = list[tuple[tuple[Array, ...], tuple[Array, ...]]]  # keys and values of each cache


def empty_layers(caches: Sequence[KVCache], num_pages: int, make: Callable[..., Array]) -> Layers:
    """Returns pages for the layers of caches, or of their shapes, and one more, which is nobody's.

    `make` makes an array of zeros of a shape and dtype, on a mesh its heads split or not.
    """

    def pages(cache: KVCache, leaves: Sequence[Any]) -> tuple[Array, ...]:
        shapes = [(num_pages + 1, leaf.shape[1], PAGE, leaf.shape[3]) for leaf in leaves]
        return tuple(make(shape, leaves[0].dtype, is_split=cache.is_split) for shape in shapes)

    return [(pages(cache, cache.keys), pages(cache, cache.values)) for cache in caches]


def caches_in(tree: Any) -> list[Any]:
    """Returns the caches in a pytree."""
    return [node for node in jax.tree.leaves(tree, is_leaf=_is_cache) if _is_cache(node)]


def map_caches(function: Callable[[Any], Any], tree: Any) -> Any:
    """Returns a pytree with function(cache) for each cache in it."""
    return jax.tree.map(
        lambda node: function(node) if _is_cache(node) else node, tree, is_leaf=_is_cache
    )


def page_bytes(tree: Any) -> int:
    """Returns the bytes of a page's worth of slots in all layers of a pytree's caches."""
    return sum(tree_bytes((c.keys, c.values)) * PAGE // c.num_slots for c in caches_in(tree))


def with_layers(tree: Any, layers: Layers, table: Int32[np.ndarray, "b m"]) -> Any:
    """Returns a pytree whose paged caches have these layers, in order, and this table."""
    left = iter(layers)

    def give(cache: PagedKVCache) -> PagedKVCache:
        keys, values = next(left)
        # A copy for each: a program takes over what it is given, and the host changes its own.
        return cache.replace(keys=keys, values=values, table=jnp.array(table))

    return map_caches(give, tree)


def name_pages(tables: Sequence[np.ndarray], row: int, pages: Sequence[Any]) -> None:
    """Writes into each part's table [b m] which pages a row has, in the order of its slots."""
    for table, own in zip(tables, pages, strict=True):
        table[row] = 0
        table[row, : len(own)] = own


def _is_cache(node: Any) -> bool:
    return isinstance(node, KVCache)

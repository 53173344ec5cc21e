"""The KV cache: a value whose rollback is an integer.

    slot      0    1    2    3    4    5    6    7    8    9 ...
    holds     A    B    C    D  | x    y    z  |  -    -    -
              committed         | block        |  never read
                          length^

A model call writes the keys and values of its tokens after the committed slots. Each of its tokens
sees the committed slots and, inside the block, what the block mask allows. The call leaves `length`
alone. `commit` makes block slots permanent, and `rollback` gives slots up again. Both set an
integer and move no keys or values, so rejecting drafts costs nothing: their slots are no longer
visible, and the next block overwrites them. (A tree's commit also moves its chosen slots together.)

A slot is not a position. The model is told each token's position apart, so that a tree may hold
several tokens of one position.

In pages, rows take as much memory as they have tokens, and may share beginnings. Pages are numbered
from 1. Page 0 is nobody's: a row's table names it where there is no page, and what rows without
pages write goes there. Tables come from the host, and stay as they are during a program: whoever
runs it gives a row all pages that it may write before.

Of an encoder-decoder the cache also has the keys and values of each row's source, which stay as the
encoder made them: neither `commit` nor `rollback` knows of them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int32

from jspec.common.memory import tree_bytes
from jspec.common.typing import BlockMask, RowCounts
from jspec.kernels import (
    PAGE,
    TAIL,
    attend,
    attend_capped,
    attend_gathered,
    attend_pages,
    run_if,
    write_pages,
    write_rows,
)


class Source(struct.PyTreeNode):
    """What each row's encoder made of its source: constants of the decoder's cross-attention.

    Attributes:
      keys: one array [b k s h] a layer.
      values: one array [b k s h] a layer.
      length: slots of each row that count, at least 1, [b].
    """

    keys: tuple[Float[Array, "b k s h"], ...]
    values: tuple[Float[Array, "b k s h"], ...]
    length: RowCounts

    @classmethod
    def init(cls, num_layers: int, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Self:
        """Returns sources of one slot of zeros, in arrays of that shape [b k s h]."""
        keys, values = (tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)) for _ in range(2))
        return cls(keys, values, length=jnp.ones([shape[0]], jnp.int32))

    def visible(self, num_tokens: int) -> Bool[Array, "b t s"]:
        """Returns which slots queries see: all that count."""
        slots = jnp.arange(self.keys[0].shape[2])
        visible = (slots < self.length[:, None])[:, None]
        return jnp.broadcast_to(visible, (len(self.length), num_tokens, len(slots)))


class KVCache(struct.PyTreeNode):
    """Keys and values of every layer, and how many slots of each row are committed.

    Attributes:
      keys: one array [b k s h] a layer; s is the capacity plus `TAIL`, which is never committed.
      values: one array [b k s h] a layer.
      length: committed slots, [b].
      is_split: whether these heads are one device's, and others have the rest.
      source: what the encoder made of each row's source; None without an encoder.
      begin: tokens of the text before the first slot's, -1 where none was read yet, [b]; None in a
        cache of the whole text.
    """

    keys: tuple[Float[Array, "b k s h"], ...]
    values: tuple[Float[Array, "b k s h"], ...]
    length: RowCounts
    is_split: bool = struct.field(pytree_node=False, default=False)
    source: Source | None = None
    begin: RowCounts | None = None

    @classmethod
    def init(cls, num_layers: int, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Self:
        """Returns an empty cache of that shape [b k capacity h]."""
        b, k, capacity, h = shape
        keys, values = (
            tuple(jnp.zeros((b, k, capacity + TAIL, h), dtype) for _ in range(num_layers))
            for _ in range(2)
        )
        return cls(keys=keys, values=values, length=jnp.zeros([b], jnp.int32))

    @property
    def capacity(self) -> int:
        """Slots of a row that can be committed."""
        return self.keys[0].shape[2] - TAIL

    @property
    def num_slots(self) -> int:
        """Slots of a row."""
        return self.keys[0].shape[2]

    @property
    def first(self) -> RowCounts:
        """The place in the text of the first slot's token, [b]."""
        return jnp.zeros_like(self.length) if self.begin is None else jnp.maximum(self.begin, 0)

    @property
    def end(self) -> RowCounts:
        """Tokens of the text up to the last committed slot, from its beginning on, [b]."""
        return self.first + self.length

    def layer(self, index: int) -> Self:
        """Returns the cache of one layer, which `write` and `attend` take."""
        return self.replace(keys=(self.keys[index],), values=(self.values[index],), source=None)

    def with_layer(self, index: int, layer: Self) -> Self:
        """Returns the cache with one of its layers replaced by `layer`."""
        keys, values = list(self.keys), list(self.values)
        keys[index], values[index] = layer.keys[0], layer.values[0]
        return self.replace(keys=tuple(keys), values=tuple(values))

    def write(
        self, keys: Float[Array, "b t k h"], values: Float[Array, "b t k h"], offset: int = 0
    ) -> Self:
        """Writes a block `offset` slots after the committed ones of a one-layer cache.

        `length` stays. What falls past the capacity is lost, never moved onto a good slot.
        """
        start = self.length + offset
        (own_keys,), (own_values,) = self.keys, self.values
        return self.replace(
            keys=(self._put(own_keys, keys, start),),
            values=(self._put(own_values, values, start),),
        )

    def visible(
        self, block_mask: Bool[Array, "#b t u"], window: int | None = None
    ) -> Bool[Array, "b t s"]:
        """Returns which slots each query may see: the committed ones and, of u, its block's.

        u is above t where earlier calls have written a part of the block.

        With a window, a query sees only the last `window` tokens of its own path, itself included.
        The cache keeps all slots, so that rollback stays an integer. In a tree the distance is
        counted along the path: the tokens of the path after a slot, not the slots after it.
        """
        t, u = block_mask.shape[1:]
        # Slots relative to the block's first slot, which lies elsewhere in every row.
        relative = jnp.arange(self.num_slots) - self.length[:, None]
        in_block = (relative >= 0) & (relative < u)
        index = jnp.clip(relative, 0, u - 1)
        block_mask = jnp.broadcast_to(block_mask, (self.length.shape[0], t, u))
        is_committed = (relative < 0)[:, None, :]
        if window is not None:
            # What a query sees of its block is a path, whose last token is the query itself.
            depths = jnp.cumsum(block_mask, axis=-1, dtype=jnp.int32)
            depth = depths[..., -1:]
            block_mask &= depth - depths < window
            is_committed &= depth - 1 - relative[:, None, :] < window
        allowed = jnp.take_along_axis(block_mask, index[:, None, :], axis=2)
        # Slots after the block are never visible, whatever earlier blocks have left there.
        return is_committed | (in_block[:, None, :] & allowed)

    def distances(self, block_mask: Bool[Array, "#b t u"]) -> Int32[Array, "b t s"]:
        """Returns how many tokens each query stands after each slot, along the query's own path.

        Of slots that a query does not see the number means nothing.
        """
        t, u = block_mask.shape[1:]
        relative = jnp.arange(self.num_slots) - self.length[:, None]
        depths = jnp.cumsum(block_mask, axis=-1, dtype=jnp.int32)
        depth = depths[..., -1:]
        in_block = jnp.broadcast_to(depth - depths, (self.length.shape[0], t, u))
        index = jnp.clip(relative, 0, u - 1)[:, None, :]
        in_block = jnp.take_along_axis(in_block, index, axis=2)
        is_committed = (relative < 0)[:, None, :]
        return jnp.where(is_committed, depth - 1 - relative[:, None, :], in_block)

    def attend(
        self,
        queries: Float[Array, "b t n h"],
        visible: Bool[Array, "b t s"],
        softcap: float | None = None,
        bias: Float[Array, "b n t s"] | None = None,
    ) -> Float[Array, "b t n h"]:
        """Returns the attention over the visible slots of a one-layer cache; `kernels.attend`."""
        (keys,), (values,) = self.keys, self.values
        if softcap is not None or bias is not None:
            return attend_capped(queries, keys, values, visible, softcap, bias)
        return attend(queries, keys, values, visible)

    def commit(self, num_tokens: RowCounts, path: Int32[Array, "b p"] | None = None) -> Self:
        """Makes block slots permanent.

        Args:
          num_tokens: how many, [b]; 0 leaves a row as it was. Slots past the capacity were never
            written, and are not committed.
          path: for a tree, the block slots kept, in order (0 is the first of the block); entries
            from `num_tokens` on are ignored. None for a chain, whose slots lie in order already.
        """
        cache = self if path is None else self._compact(path, num_tokens)
        return cache.replace(length=jnp.minimum(self.length + num_tokens, self.capacity))

    def _compact(self, path: Int32[Array, "b p"], num_tokens: RowCounts) -> Self:
        """Moves the block slots of a path to the first slots after the committed ones."""
        order = jnp.arange(path.shape[1])
        source = self.length[:, None] + path

        # All slots are read before any is written, so a slot may be both source and goal. Keys need
        # no new rotation: a token of depth d had the position that it has after the move.
        def move(layer: Array) -> Array:
            kept = self._take(layer, source).astype(jnp.float32)  # as C++ takes it; no rounding
            return self._put(layer, kept, self.length)

        # Where all paths lie in order already, as those of a tree's first branch do, nothing moves.
        is_moved = ((path != order) & (order < num_tokens[:, None])).any()
        keys, values = run_if(
            is_moved, functools.partial(jax.tree.map, move), (self.keys, self.values)
        )
        return self.replace(keys=keys, values=values)

    def _put(self, layer: Array, new: Float[Array, "b t k h"], start: RowCounts) -> Array:
        return write_rows(layer, new, start)

    def _take(self, layer: Array, slots: Int32[Array, "b p"]) -> Float[Array, "b p k h"]:
        kept = jnp.take_along_axis(layer, slots[:, None, :, None], axis=2, mode="clip")
        return kept.transpose(0, 2, 1, 3)

    def side_by_side(self, row: Int32[Array, "t"], place: Int32[Array, "t"]) -> "PackedKVCache":
        """Returns the cache for a call on tokens [t 1] of any rows; see `PackedKVCache`.

        Args:
          row: of each token.
          place: of each token in its row's block; those of a row rise from 0 by 1.
        """
        return PackedKVCache(
            keys=self.keys,
            values=self.values,
            length=self.length[row] + place,
            is_split=self.is_split,
            table=self._table_of(row),
        )

    def joined(self, packed: "PackedKVCache") -> Self:
        """Returns the cache with what a call on it, side by side, has written."""
        return self.replace(keys=packed.keys, values=packed.values)

    def _table_of(self, row: Int32[Array, "t"]) -> Int32[Array, "t m"]:
        return row[:, None]  # a row is one page

    def rollback(self, length: RowCounts) -> Self:
        """Returns the cache with only the first `length` slots of each row committed."""
        return self.replace(length=length)


def causal_mask(num_tokens: int) -> BlockMask:
    """Returns the block mask [1 t t] of a chain: each token sees itself and those before it."""
    return jnp.tril(jnp.ones([1, num_tokens, num_tokens], bool))


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

    def _table_of(self, row: Int32[Array, "t"]) -> Int32[Array, "t m"]:
        return self.table[row]

    def _put(self, layer: Array, new: Float[Array, "b t k h"], start: RowCounts) -> Array:
        return write_pages(layer, new, start, self.table)

    def _take(self, layer: Array, slots: Int32[Array, "b p"]) -> Float[Array, "b p k h"]:
        pages = jnp.take_along_axis(self.table, slots // PAGE, axis=1, mode="clip")
        return layer[pages, :, slots % PAGE]


class PackedKVCache(PagedKVCache, kw_only=True):
    """Rows of any number of tokens each, side by side: to the model each token is a separate row.

        rows of the cache     0: a b c | x y        1: d e | z
        tokens of the call    x y z                 rows with 3, 4 and 2 tokens before them

    A token sees the committed slots of its row and those of the row's earlier tokens in the call,
    which every layer writes before it attends. So blocks need no common width.

    Attributes:
      table: the pages of each token's row, [t m]; a row of a cache without pages is one page.
    """

    @property
    def num_slots(self) -> int:
        """Slots of a row."""
        return self.table.shape[1] * self.keys[0].shape[2]


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
        # A copy for each cache: a program takes over its arguments, and the host changes its table.
        return cache.replace(keys=keys, values=values, table=jnp.array(table))

    return map_caches(give, tree)


def name_pages(tables: Sequence[np.ndarray], row: int, pages: Sequence[Any]) -> None:
    """Writes into each part's table [b m] which pages a row has, in the order of its slots."""
    for table, own in zip(tables, pages, strict=True):
        table[row] = 0
        table[row, : len(own)] = own


def _is_cache(node: Any) -> bool:
    return isinstance(node, KVCache)

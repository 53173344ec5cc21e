"""The KV cache: a value whose rollback is an integer.

    slot      0    1    2    3    4    5    6    7    8    9 ...
    holds     A    B    C    D  | x    y    z  |  -    -    -
              committed         | block        |  never read
                          length^

A model call writes the keys and values of its tokens after the committed slots and lets them see
the committed slots and, inside the block, what the block mask allows. It leaves `length` alone:
`commit` makes block slots permanent, `rollback` takes them back, and both only set an integer
(a tree's commit also moves its chosen slots together). A slot is not a position: a token's position
is given to the model apart, so that a tree may hold several tokens of one position.
"""

import functools
from typing import Self

import jax
import jax.numpy as jnp
from flax import struct
from jax.lax import Precision
from jaxtyping import Array, Bool, Float, Int32

from jspec import kernels
from jspec.common.typing import BlockMask, RowCounts
from jspec.kernels import fused_attention

TAIL = 16  # slots behind the capacity, so that a small block written at its end stays inside
_FEW_QUERIES = 16  # up to which attention on any CPU is faster without XLA
_NATIVE_DIMS = (32, 64, 128, 256)  # of a head
_NATIVE_TYPES = (jnp.bfloat16, jnp.float32)
_MASKED = -1e30  # finite, so that a row that may see nothing gives no NaN


class KVCache(struct.PyTreeNode):
    """Keys and values of every layer, and how many slots of each row are committed.

    Attributes:
      keys: one array [b k s h] a layer; s is the capacity and a tail that is never committed.
      values: one array [b k s h] a layer.
      length: committed slots, [b].
    """

    keys: tuple[Float[Array, "b k s h"], ...]
    values: tuple[Float[Array, "b k s h"], ...]
    length: RowCounts

    @classmethod
    def init(
        cls,
        *,
        num_layers: int,
        batch_size: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: jax.typing.DTypeLike,
    ) -> Self:
        """Returns an empty cache of `capacity` slots a row."""
        shape = (batch_size, num_kv_heads, capacity + TAIL, head_dim)
        keys, values = (tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)) for _ in range(2))
        return cls(keys=keys, values=values, length=jnp.zeros([batch_size], jnp.int32))

    @property
    def capacity(self) -> int:
        """Slots of a row that can be committed."""
        return self.keys[0].shape[2] - TAIL

    def layer(self, index: int) -> Self:
        """Returns the cache of one layer, which is written and attended to."""
        return self.replace(keys=(self.keys[index],), values=(self.values[index],))

    def with_layer(self, index: int, layer: Self) -> Self:
        """Returns the cache with that one in the place of one of its layers."""

        def put(layers: tuple[Array, ...], own: tuple[Array, ...]) -> tuple[Array, ...]:
            return (*layers[:index], *own, *layers[index + 1 :])

        return self.replace(keys=put(self.keys, layer.keys), values=put(self.values, layer.values))

    def write(
        self,
        keys: Float[Array, "b t k h"],
        values: Float[Array, "b t k h"],
        offset: int = 0,
    ) -> Self:
        """Writes a block after the committed slots of a one-layer cache; `length` stays.

        Args:
          keys: the block's keys.
          values: the block's values.
          offset: slots between the committed ones and the first one written.

        Returns:
          The cache. What falls past the capacity is lost, never moved onto a good slot.
        """
        start = self.length + offset

        def put(layers: tuple[Array, ...], new: Array) -> tuple[Array, ...]:
            (layer,) = layers
            return (write_rows(layer, new, start),)

        return self.replace(keys=put(self.keys, keys), values=put(self.values, values))

    def visible(self, block_mask: Bool[Array, "#b t u"]) -> Bool[Array, "b t s"]:
        """Returns which slots each query may see: the committed ones and its block's."""
        t, u = block_mask.shape[1:]
        relative = jnp.arange(self.capacity + TAIL) - self.length[:, None]
        in_block = (relative >= 0) & (relative < u)
        index = jnp.clip(relative, 0, u - 1)
        block_mask = jnp.broadcast_to(block_mask, (self.length.shape[0], t, u))
        allowed = jnp.take_along_axis(block_mask, index[:, None, :], axis=2)
        return (relative < 0)[:, None, :] | (in_block[:, None, :] & allowed)

    def attend(
        self, queries: Float[Array, "b t n h"], visible: Bool[Array, "b t s"]
    ) -> Float[Array, "b t n h"]:
        """Returns the attention of queries, already scaled, over the visible slots of one layer.

        Scores and softmax are float32; the result has the type of the queries. C++ computes it on
        CPU, cuDNN a prompt's chunk in bfloat16 on a GPU, and XLA everything else.
        """
        _, t, _, h = queries.shape
        (keys,), (values,) = self.keys, self.values
        operands = queries, keys, values, visible
        if fused_attention.is_usable(_attend, queries, keys):
            return fused_attention.call(_attend, *operands)
        is_native = (
            (t <= _FEW_QUERIES or kernels.has_pairs())
            and h in _NATIVE_DIMS
            and queries.dtype == jnp.float32
            and keys.dtype in _NATIVE_TYPES
        )
        if is_native and kernels.is_available():
            result = jax.ShapeDtypeStruct(queries.shape, jnp.float32)
            return kernels.call("attention", _attend, result, *operands)
        return _attend(*operands)

    def commit(self, num_tokens: RowCounts, path: Int32[Array, "b p"] | None = None) -> Self:
        """Makes block slots permanent.

        Args:
          num_tokens: how many, [b]; 0 leaves a row as it was. What would lie past the capacity was
            never written, and is not committed.
          path: for a tree, the block slots kept, in order (0 is the first of the block); entries
            from `num_tokens` on are ignored. None for a chain, whose slots lie in order already.
        """
        cache = self if path is None else self._compact(path)
        return cache.replace(length=jnp.minimum(self.length + num_tokens, self.capacity))

    def _compact(self, path: Int32[Array, "b p"]) -> Self:
        rows = jnp.arange(path.shape[0])[:, None]
        source = self.length[:, None] + path
        goal = self.length[:, None] + jnp.arange(path.shape[1])

        def move(layer: Array) -> Array:
            return layer.at[rows, :, goal].set(layer[rows, :, source], mode="drop")

        return self.replace(
            keys=jax.tree.map(move, self.keys), values=jax.tree.map(move, self.values)
        )

    def rollback(self, length: RowCounts) -> Self:
        """Returns the cache with only the first `length` slots of each row committed."""
        return self.replace(length=length)


def _attend(
    queries: Float[Array, "b t n h"],
    keys: Float[Array, "b k s h"],
    values: Float[Array, "b k s h"],
    visible: Bool[Array, "b t s"],
) -> Float[Array, "b t n h"]:
    """Attends by XLA, which goes through all slots and masks those that are not visible."""
    b, t, n, h = queries.shape
    k = keys.shape[1]
    grouped = queries.reshape(b, t, k, n // k, h).transpose(0, 2, 1, 3, 4)
    grouped = grouped.reshape(b, k, t * (n // k), h).astype(keys.dtype)
    precision = Precision.HIGHEST if keys.dtype == jnp.float32 else None  # float32, not TF32
    multiply = functools.partial(
        jnp.einsum, precision=precision, preferred_element_type=jnp.float32
    )
    scores = multiply("bkqh,bksh->bkqs", grouped, keys)
    mask = jnp.repeat(visible, n // k, axis=1)[:, None]
    probs = jax.nn.softmax(jnp.where(mask, scores, _MASKED), axis=-1)
    mixed = multiply("bkqs,bksh->bkqh", probs.astype(values.dtype), values)
    mixed = mixed.reshape(b, k, t, n // k, h).transpose(0, 2, 1, 3, 4)
    return mixed.reshape(b, t, n, h).astype(queries.dtype)


def write_rows(
    layer: Float[Array, "b k s h"], new: Float[Array, "b t k h"], start: RowCounts
) -> Float[Array, "b k s h"]:
    """Writes `new` at each row's own start, in a layer with `TAIL` slots more than are ever meant.

    What falls behind them is lost, never shifted onto a good slot.
    """
    if kernels.is_available() and layer.dtype in _NATIVE_TYPES:
        result = jax.ShapeDtypeStruct(layer.shape, layer.dtype)
        operands = layer, new.astype(jnp.float32), start
        return kernels.call("write_rows", _write_rows, result, *operands)
    return _write_rows(layer, new, start)


def _write_rows(
    layer: Float[Array, "b k s h"], new: Float[Array, "b t k h"], start: RowCounts
) -> Float[Array, "b k s h"]:
    """Writes by XLA.

    A scatter drops what falls outside. `dynamic_update_slice` would shift it, but XLA on CPU writes
    with it in place where it converts a whole bfloat16 layer for a scatter: there a small block is
    written so. It begins at the capacity at the latest, and the tail of the layer has room for it.
    Rows take turns in a loop: XLA would fuse a chain of updates into one that goes through the
    whole layer for every row.
    """
    new = new.astype(layer.dtype)
    b, t = new.shape[:2]
    if jax.default_backend() != "cpu" or t > TAIL:
        rows, slots = jnp.arange(b)[:, None], start[:, None] + jnp.arange(t)
        return layer.at[rows, :, slots].set(new, mode="drop")
    new, start = new.transpose(0, 2, 1, 3), jnp.minimum(start, layer.shape[2] - TAIL)

    def write(row: Array | int, layer: Array) -> Array:
        own = jax.lax.dynamic_slice_in_dim(new, row, 1)
        return jax.lax.dynamic_update_slice(layer, own, (row, 0, start[row], 0))

    return write(0, layer) if b == 1 else jax.lax.fori_loop(0, b, write, layer)


def causal_mask(num_tokens: int) -> BlockMask:
    """Returns the block mask [1 t t] of a chain: each token sees itself and those before it."""
    return jnp.tril(jnp.ones([1, num_tokens, num_tokens], bool))

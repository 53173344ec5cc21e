"""What kernels are tried on: random operands of a model's shapes, among memory that is poisoned."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jspec.kernels.attention import TAIL
from jspec.kernels.packed import FORMATS, STRIP, JoinedKernel, PackedKernel, unpack
from jspec.kernels.quantized import QuantizedKernel, quantized_rows

WIDTHS = (1, 5, 16)  # tokens of a call: a plain step, a usual verify call, the widest of few
_SLOTS = 1024  # of a row, half of them committed where there is one row
# In slots that nobody may see. Finite, as XLA's attention multiplies them by 0, and 0 · NaN is NaN.
_POISON = 3e4
_LARGEST_HOLE = 22  # power of two, in floats: 16 MB
_OUTPUTS_AT_ONCE = 4096


class Operands(NamedTuple):
    """The operands of a call on tokens.

    Attributes:
      weights: the parameters, of which a model has as many as layers.
      stream: what a layer hands on to the next, [b t d].
      fixed: what depends on the tokens besides, arrays [b t ...].
      state: a cache, or nothing.
    """

    weights: Any
    stream: Array
    fixed: tuple[Any, ...]
    state: Any

    def first(self, width: int) -> "Operands":
        """Returns the same call on the first tokens only."""
        stream, fixed = jax.tree.map(lambda leaf: leaf[:, :width], (self.stream, self.fixed))
        return self._replace(stream=stream, fixed=fixed)

    def of_block(self) -> tuple[Any, ...]:
        """Returns what a decoder block takes: parameters, stream, rope, visible, cache, inputs."""
        return self.weights, self.stream, *self.fixed[:2], self.state, *self.fixed[2:]

    def precise(self) -> "Operands":
        """Returns the same numbers in float32, in which products are exact to float32's rounding.

        Rows are no longer rounded to bytes before they are multiplied, where kernels ask for it.
        """
        return jax.tree.map(_decode, self, is_leaf=_is_compact)


Run = Callable[[Operands], tuple[Array, Any]]  # returns the stream of the next layer, and the state
Draw = Callable[[Array], Operands]  # from a seed


def block_operands(shapes: Any, block_offset: int, seed: Array) -> Operands:
    """Returns random operands of a decoder block of 16 tokens.

    Rows have different lengths, for odd seeds of a few tokens: there the block's own keys decide
    what attention chooses. The tokens are a tree, and the first slots are hidden, as a window
    hides them. What must not be read is poisoned.

    Args:
      shapes: parameters, stream, rope, visible, cache and, for some layers, inputs of a call.
      block_offset: slots that earlier calls of the block have written.
      seed: of the numbers.
    """
    params, x, rope, _, cache, *inputs = shapes
    keys = _keys(seed)
    b, t = x.shape[0], WIDTHS[-1]
    has_pages = hasattr(cache, "table")
    num_slots = _SLOTS if has_pages else _SLOTS + TAIL

    def draw(leaf: Any) -> Array:
        return jax.random.normal(next(keys), (b, t, *leaf.shape[2:]), leaf.dtype)

    most = jnp.where(seed % 2 == 0, _SLOTS - t - block_offset, 2 * (b + 1))
    length = most * (jnp.arange(b, dtype=jnp.int32) + 1) // (b + 1)
    begin, slots = length + block_offset, jnp.arange(num_slots)
    in_block = slots - begin[:, None]  # [b s]
    is_ancestor = jnp.asarray(_tree_mask(t))[:, jnp.clip(in_block, 0, t - 1)].transpose(1, 0, 2)
    is_seen = (slots >= length[:, None] // 8) & (in_block < 0)
    visible = is_seen[:, None] | (is_ancestor & ((in_block >= 0) & (in_block < t))[:, None])

    def layer(leaf: Any, scale: float) -> Array:
        k, h = leaf.shape[1], leaf.shape[-1]
        numbers = scale * jax.random.normal(next(keys), (b, k, num_slots, h), leaf.dtype)
        numbers = jnp.where(is_seen[:, None, :, None], numbers, jnp.asarray(_POISON, leaf.dtype))
        return _in_pages(numbers, leaf.shape[2]) if has_pages else numbers

    # Keys large enough for attention to choose: the mean of many values would be next to nothing.
    keys_layer, values_layer = layer(cache.keys[0], 4.0), layer(cache.values[0], 1.0)
    layers: dict[str, Any] = {"keys": (keys_layer,), "values": (values_layer,)}
    if has_pages:
        num_pages = num_slots // cache.keys[0].shape[2]
        layers["table"] = jnp.arange(b * num_pages, 0, -1, dtype=jnp.int32).reshape(b, num_pages)
    state = cache.replace(length=length, **layers)
    weights = jax.tree.map(lambda leaf: _draw_weights(keys, leaf), params, is_leaf=_is_compact)
    fixed = (jax.tree.map(draw, rope), visible, *map(draw, inputs))
    return Operands(weights, draw(x), fixed, state)


def product_operands(shapes: Any, seed: Array) -> Operands:
    """Returns 16 random rows [1 16 i] and a random kernel; the shapes are rows [r i] and it."""
    rows, kernel = shapes
    keys = _keys(seed)
    stream = jax.random.normal(next(keys), (1, WIDTHS[-1], rows.shape[-1]), rows.dtype)
    return Operands(_draw_weights(keys, kernel), stream, (), ())


def precise_product(operands: Operands) -> tuple[np.ndarray, tuple[()]]:
    """Returns the outputs [1 t o] of a product, summed in float64 on the host."""
    rows, kernel = jax.device_get((operands.stream[0], _decode(operands.weights)))
    rows, kernel = np.asarray(rows, np.float64), kernel.reshape(-1, rows.shape[-1])
    # A part at a time: all of a head's weights in float64 are gigabytes.
    starts = range(0, len(kernel), _OUTPUTS_AT_ONCE)
    parts = [rows @ kernel[i : i + _OUTPUTS_AT_ONCE].T.astype(np.float64) for i in starts]
    return np.concatenate(parts, axis=1)[None].astype(np.float32), ()


def poisoned(shape: Any) -> Array:
    """Returns NaN where a result is going to lie."""
    return jnp.full(shape.shape, jnp.nan, shape.dtype)


def poison_memory() -> None:
    """Fills pieces of free memory of all sizes with NaN, for whoever takes them next."""
    pieces = [jnp.full(1 << size, jnp.nan) for size in range(6, _LARGEST_HOLE)]
    jax.block_until_ready(pieces)


def _tree_mask(num_tokens: int) -> np.ndarray:
    """Returns which tokens each one of a binary tree sees: its ancestors and itself, [t t]."""
    mask = np.eye(num_tokens, dtype=bool)
    for token in range(1, num_tokens):
        mask[token] |= mask[(token - 1) // 2]
    return mask


def _in_pages(layer: Array, page: int) -> Array:
    """Lays slots [b k s h] out in pages from 1 on, the last slots first; page 0 is poisoned."""
    b, k, s, h = layer.shape
    pages = layer.reshape(b, k, s // page, page, h).transpose(0, 2, 1, 3, 4)
    pages = pages.reshape(-1, k, page, h)[::-1]
    return jnp.concatenate([jnp.full_like(pages[:1], _POISON), pages])


def _keys(seed: Array) -> Iterator[Array]:
    return (jax.random.fold_in(jax.random.key(seed), number) for number in itertools.count())


def _is_compact(leaf: Any) -> bool:
    return isinstance(leaf, (QuantizedKernel, PackedKernel, JoinedKernel))


def _draw_weights(keys: Iterator[Array], leaf: Any) -> Any:
    if isinstance(leaf, JoinedKernel):
        parts = tuple(_draw_weights(keys, part) for part in leaf.parts)
        return leaf.replace(parts=parts, order=jnp.arange(leaf.order.size, dtype=jnp.int32))
    if isinstance(leaf, PackedKernel):
        # Elements of two bytes are float16 numbers: these bits leave some between 0 and 0.004.
        fields = FORMATS[leaf.kind].fields
        mask = [np.full(STRIP * size * n, 0x1B if size == 2 else 0xFF) for size, n in fields]
        strips = jax.random.bits(next(keys), leaf.strips.shape, jnp.uint8)
        mask = np.resize(np.concatenate(mask).astype(np.uint8), strips.shape[1])  # of all blocks
        return leaf.replace(strips=strips & mask)
    if isinstance(leaf, QuantizedKernel):
        values = jax.random.bits(next(keys), leaf.values.shape, jnp.uint8)
        values = jax.lax.bitcast_convert_type(values, leaf.values.dtype)
        multipliers = leaf.multipliers
        if multipliers is not None:  # -8 times 16 is the least that an int8 holds
            multipliers = jax.random.randint(next(keys), multipliers.shape, 1, 17, jnp.int8)
        scales = jnp.full(leaf.scales.shape, 0.015 / math.sqrt(leaf.shape[-1]))
        return leaf.replace(values=values, multipliers=multipliers, scales=scales)
    numbers = jax.random.normal(next(keys), leaf.shape, leaf.dtype)
    if len(leaf.shape) == 1:
        return 1 + numbers / 8  # as norms do
    # So that every product adds about as much to the stream.
    return numbers / math.sqrt(leaf.shape[-1])


def _decode(leaf: Any) -> Any:
    if isinstance(leaf, JoinedKernel):
        parts = [_decode(part).reshape(-1, leaf.shape[-1]) for part in leaf.parts]
        return jnp.concatenate(parts)[leaf.order].reshape(leaf.shape)
    if isinstance(leaf, PackedKernel):
        num_outputs = math.prod(leaf.shape[:-1])
        return unpack(leaf.strips, leaf.kind)[:num_outputs].reshape(leaf.shape)
    if isinstance(leaf, QuantizedKernel):
        ids = jnp.arange(leaf.scales.size, dtype=jnp.int32)
        return quantized_rows(leaf, ids[None])[0].reshape(leaf.shape)
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    return leaf.astype(jnp.float32) if is_float else leaf

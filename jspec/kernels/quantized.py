"""Kernels of 8-bit and 4-bit integers, and the product of float rows with them.

A weight is the scale of its output times an int8. A 4-bit integer becomes that int8 when it is
multiplied by its group's multiplier, itself an integer, so one product serves both kinds. The
model's type holds these integers exactly.

On CPU the C++ converts a few outputs' weights at a time, which then stay in the processor's cache.
On other devices XLA can fuse the conversion into the product. On CPU without a C++ compiler XLA
would write the converted weights to memory and read them again, which takes ten times as long, but
its int8 · int8 -> int32 product is fast: there each row is split into int8 digits of base 254. Two
digits hold 16 bits of a row's largest number, which is enough for bfloat16; float32 takes three.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int, Int8, Shaped, UInt8

from jspec.kernels import library
from jspec.kernels.backend import backend, dot, padded

GROUP = 32  # inputs that share a multiplier
_HALF = GROUP // 2  # of a group: the inputs in the low bits, and those in the high bits
_BASE = 254.0  # rounding leaves at most 1/2, so the rest times this is in [-127, 127] again


class QuantizedKernel(struct.PyTreeNode):
    """A kernel of integers, which replaces a float array [*out, *in] in the parameter dict.

    Attributes:
      values: int8 [o i]; or uint8 [o i/2], two 4-bit integers a byte: byte j of a group's 16 holds
        its input j in the low bits and its input j + 16 in the high ones, in two's complement.
      scales: float32 [o], one an output.
      multipliers: int8 [o i/32], one for each group of 32 inputs; None for int8 values.
      shape: of the float array.
      dtype: the model's, bfloat16 or float32. Its caches have it, and its products where the device
        multiplies it fast.
    """

    values: Int8[Array, "o i"] | UInt8[Array, "o packed"]
    scales: Float32[Array, "o"]
    multipliers: Int8[Array, "o groups"] | None
    shape: tuple[int, ...] = struct.field(pytree_node=False)
    dtype: Any = struct.field(pytree_node=False)

    def astype(self, dtype: DTypeLike) -> "QuantizedKernel":
        """Returns the kernel of the same model in another type: the weights are the same."""
        return self.replace(dtype=jnp.dtype(dtype))


def quantized_product(rows: Float[Array, "r i"], kernel: QuantizedKernel) -> Float32[Array, "r o"]:
    """Returns rows · kernelᵀ, [r o], in float32."""
    weights = kernel.values, kernel.scales
    if kernel.multipliers is not None:
        weights += (kernel.multipliers,)
    if library.is_available():
        name = "int8_product" if kernel.multipliers is None else "int4_product"
        # Without instructions for bfloat16 the C++ would convert every row to float32 anyway.
        dtype = kernel.dtype if library.has_pairs() else jnp.float32
        result = library.floats(rows.shape[0], kernel.scales.size)
        return library.call(name, _float_product, result, rows.astype(dtype), *weights)
    if backend() == "cpu":
        return _integer_product(rows.astype(jnp.float32), kernel)
    return _float_product(padded(rows.astype(kernel.dtype)), *weights)[: rows.shape[0]]


def quantized_rows(table: QuantizedKernel, ids: Int[Array, "b t"]) -> Float32[Array, "b t d"]:
    """Returns rows of a table, [b t d], in float32."""
    multipliers = None if table.multipliers is None else table.multipliers[ids.reshape(-1)]
    parts = _unpack(table.values[ids.reshape(-1)], multipliers)
    size = _HALF if len(parts) > 1 else table.values.shape[1]
    # The halves of each group stand side by side.
    integers = jnp.stack([part.reshape(ids.size, -1, size) for part in parts], axis=2)
    return integers.reshape(*ids.shape, -1).astype(jnp.float32) * table.scales[ids][..., None]


def _float_product(
    rows: Float[Array, "r i"],
    values: Int8[Array, "o i"] | UInt8[Array, "o packed"],
    scales: Float32[Array, "o"],
    multipliers: Int8[Array, "o groups"] | None = None,
) -> Float32[Array, "r o"]:
    """Multiplies by converted weights; the reference of both C++ products."""
    weights = [half.astype(rows.dtype) for half in _unpack(values, multipliers)]
    return _dot(rows, weights, jnp.float32) * scales


def _integer_product(rows: Float32[Array, "r i"], kernel: QuantizedKernel) -> Float32[Array, "r o"]:
    """Multiplies the rows' digits: a row = unit · (digit 0 + digit 1 / 254 + digit 2 / 254² …)."""
    num_digits = 3 if kernel.dtype == jnp.float32 else 2
    units = jnp.max(jnp.abs(rows), axis=1, keepdims=True) / 127
    units = jnp.where(units == 0, 1.0, units)
    rest, digits = rows / units, []
    for _ in range(num_digits):
        digits.append(jnp.round(rest))
        rest = (rest - digits[-1]) * _BASE
    # Unpacked weights that do not depend on the rows would be moved out of the decoding loop.
    digits, values = jax.lax.optimization_barrier((digits, kernel.values))
    # One product of all digits: the weights are read once.
    digits = jnp.concatenate(digits).astype(jnp.int8)
    sums = _dot(digits, _unpack(values, kernel.multipliers), jnp.int32).astype(jnp.float32)
    total = jnp.zeros([], jnp.float32)
    for digit_sums in reversed(jnp.split(sums, num_digits)):
        total = digit_sums + total / _BASE  # the smallest digits first, as rounding wants
    # A row that is not finite has no finite products either.
    return total * jnp.where(jnp.isfinite(units), units, jnp.nan) * kernel.scales


def _dot(
    rows: Shaped[Array, "r i"], weights: list[Shaped[Array, "o part"]], dtype: DTypeLike
) -> Shaped[Array, "r o"]:
    """Returns rows · weightsᵀ, where the weights are what `_unpack` gives."""
    parts = [rows]
    if len(weights) > 1:
        halves = rows.reshape(rows.shape[0], -1, 2, _HALF)
        parts = [halves[:, :, part].reshape(rows.shape[0], -1) for part in range(2)]
    products = [dot(*pair, dtype) for pair in zip(parts, weights, strict=True)]
    return sum(products[1:], products[0])


def _unpack(
    values: Int8[Array, "o i"] | UInt8[Array, "o packed"],
    multipliers: Int8[Array, "o groups"] | None,
) -> list[Int8[Array, "o part"]]:
    """Returns the int8 weights: one array for all inputs, or one for each half of the groups."""
    if multipliers is None:
        return [values]
    # Two arrays, because XLA on CPU interleaves bytes ten times more slowly than it multiplies.
    # Shifts of signed bytes extend the sign of each 4-bit integer.
    signed = jax.lax.bitcast_convert_type(values, jnp.int8)
    low = jax.lax.shift_right_arithmetic(signed << jnp.int8(4), jnp.int8(4))
    high = jax.lax.shift_right_arithmetic(signed, jnp.int8(4))
    shape, factors = (*multipliers.shape, _HALF), multipliers[:, :, None]
    return [(half.reshape(shape) * factors).reshape(values.shape) for half in (low, high)]

"""Kernels of 8-bit and 4-bit integers, and the product of float rows with them.

A weight is the scale of its output times an int8. A 4-bit integer becomes that int8 when it is
multiplied by its group's multiplier, itself an integer, so one product serves both kinds. The
model's type holds these integers exactly.

Three methods multiply by such a kernel. On CPU the C++ converts a few outputs' weights at
a time, which then stay in the processor's cache. On other devices XLA can fuse the conversion into
the product. On CPU without a C++ compiler XLA would write the converted weights to memory and read
them again, at four times the cost of a float kernel, but its int8 · int8 -> int32 product is fast:
there each row is split into int8 digits of base 254. Two digits hold 16 bits of a row's largest
number, which is enough for bfloat16 models; float32 models take three.

On CPU a row's result does not depend on how many rows stand beside it: the sums have one order, or
are of exact integers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Float32, Int, Int8, Int32, Shaped, UInt8

from jspec.kernels import library
from jspec.kernels.precision import exact_float32

GROUP = 32  # inputs that share a multiplier
_HALF = GROUP // 2  # of a group: the inputs in the low bits, and those in the high bits
_BASE = 254.0  # rounding leaves at most 1/2, so the rest times this is in [-127, 127] again
_BLOCK_BYTES = 4 << 20  # of weights unpacked at a time: they stay in the processor's cache
_CONTRACT_LAST = (((1,), (1,)), ((), ()))


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

    def astype(self, dtype: jax.typing.DTypeLike) -> "QuantizedKernel":
        """Returns the kernel of the same model in another type: the weights are the same."""
        return self.replace(dtype=jnp.dtype(dtype))


def quantized_product(rows: Float[Array, "r i"], kernel: QuantizedKernel) -> Float32[Array, "r o"]:
    """Returns rows · kernelᵀ, [r o], in float32."""
    weights = kernel.values, kernel.scales
    if kernel.multipliers is not None:
        weights += (kernel.multipliers,)
    if library.is_available():
        name = "int8_product" if kernel.multipliers is None else "int4_product"
        result = jax.ShapeDtypeStruct((rows.shape[0], kernel.scales.size), jnp.float32)
        # Without instructions for bfloat16 the C++ would convert every row to float32 anyway.
        dtype = kernel.dtype if library.has_pairs() else jnp.float32
        return library.call(name, _float_product, result, rows.astype(dtype), *weights)
    if jax.default_backend() == "cpu":
        return _integer_product(rows, kernel)
    return _float_product(rows.astype(kernel.dtype), *weights)


def quantized_rows(table: QuantizedKernel, ids: Int[Array, "b t"]) -> Float32[Array, "b t d"]:
    """Returns rows of a table, [b t d], in float32."""
    multipliers = None if table.multipliers is None else table.multipliers[ids.reshape(-1)]
    parts = _unpack(table.values[ids.reshape(-1)], multipliers)
    integers = _join(parts).astype(jnp.float32)
    return integers.reshape(*ids.shape, -1) * table.scales[ids][..., None]


def _float_product(
    rows: Float[Array, "r i"],
    values: Int8[Array, "o i"] | UInt8[Array, "o packed"],
    scales: Float32[Array, "o"],
    multipliers: Int8[Array, "o groups"] | None = None,
) -> Float32[Array, "r o"]:
    """Multiplies by converted weights; the reference of both C++ products."""
    parts = _unpack(values, multipliers)
    products = [
        jax.lax.dot_general(
            inputs,
            part.astype(rows.dtype),
            _CONTRACT_LAST,
            precision=exact_float32(rows.dtype),
            preferred_element_type=jnp.float32,
        )
        for inputs, part in zip(_split(rows, len(parts)), parts, strict=True)
    ]
    return sum(products[1:], products[0]) * scales


def _integer_product(rows: Float[Array, "r i"], kernel: QuantizedKernel) -> Float32[Array, "r o"]:
    """Multiplies the rows' digits, and joins the sums: ((digit 2 / 254) + digit 1) / 254 + ..."""
    num_digits = 3 if kernel.dtype == jnp.float32 else 2
    digits, units = _to_digits(rows.astype(jnp.float32), num_digits)
    if kernel.multipliers is None:
        sums = _integer_sums(digits, kernel.values, None)
    else:
        sums = _blockwise_sums(digits, kernel.values, kernel.multipliers)
    by_digit = sums.astype(jnp.float32).reshape(num_digits, rows.shape[0], -1)
    total = by_digit[-1]
    for index in range(num_digits - 2, -1, -1):  # the smallest digits first, as rounding wants
        total = by_digit[index] + total / _BASE
    return total * units * kernel.scales


def _to_digits(
    rows: Float32[Array, "r i"], num_digits: int
) -> tuple[Int8[Array, "nr i"], Float32[Array, "r 1"]]:
    """Splits numbers: rows = unit · (digit 0 + digit 1 / 254 + digit 2 / 254² …), nearly.

    Returns:
      The digits, first those of the highest place for all rows, then the next; and each row's unit.
      The unit is NaN where the row is not finite, so that its products are not finite either.
    """
    units = jnp.max(jnp.abs(rows), axis=1, keepdims=True) / 127
    units = jnp.where(units == 0, 1.0, units)
    rest, digits = rows / units, []
    for _ in range(num_digits):
        digit = jnp.round(rest)
        digits.append(digit.astype(jnp.int8))
        rest = (rest - digit) * _BASE
    return jnp.concatenate(digits), jnp.where(jnp.isfinite(units), units, jnp.nan)


def _integer_sums(
    rows: Int8[Array, "r i"],
    values: Int8[Array, "o i"] | UInt8[Array, "o packed"],
    multipliers: Int8[Array, "o groups"] | None,
) -> Int32[Array, "r o"]:
    """Returns rows · weightsᵀ without the scales."""
    parts = _unpack(values, multipliers)
    sums = [
        jax.lax.dot_general(inputs, part, _CONTRACT_LAST, preferred_element_type=jnp.int32)
        for inputs, part in zip(_split(rows, len(parts)), parts, strict=True)
    ]
    return sum(sums[1:], sums[0])


def _blockwise_sums(
    rows: Int8[Array, "r i"],
    values: UInt8[Array, "o packed"],
    multipliers: Int8[Array, "o groups"],
) -> Int32[Array, "r o"]:
    """Does the same for a block of outputs at a time, so that unpacked weights stay in cache."""
    num_outputs = values.shape[0]
    # At least two blocks: XLA would unroll a loop of one, and unpack all weights ahead of time.
    block = max(1, min(_BLOCK_BYTES // rows.shape[1], -(-num_outputs // 2)))

    def sums(begin: jax.Array | int, size: int) -> Int32[Array, "r block"]:
        slices = (jax.lax.dynamic_slice_in_dim(a, begin, size) for a in (values, multipliers))
        return _integer_sums(rows, *slices)

    def body(index: jax.Array, outputs: jax.Array) -> jax.Array:
        begin = index * block
        return jax.lax.dynamic_update_slice_in_dim(outputs, sums(begin, block), begin, axis=1)

    outputs = jnp.zeros([rows.shape[0], num_outputs], jnp.int32)
    outputs = jax.lax.fori_loop(0, num_outputs // block, body, outputs)
    if rest := num_outputs % block:
        begin = num_outputs - rest
        outputs = outputs.at[:, begin:].set(sums(begin, rest))
    return outputs


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

    def multiply(half: Int8[Array, "o packed"]) -> Int8[Array, "o packed"]:
        grouped = half.reshape(*multipliers.shape, _HALF) * multipliers[:, :, None]
        return grouped.reshape(half.shape)

    return [multiply(low), multiply(high)]


def _split(rows: Shaped[Array, "r i"], num_parts: int) -> list[Shaped[Array, "r part"]]:
    """Returns the inputs in the parts that `_unpack` makes."""
    if num_parts == 1:
        return [rows]
    halves = rows.reshape(rows.shape[0], -1, 2, _HALF)
    return [halves[:, :, part].reshape(rows.shape[0], -1) for part in range(2)]


def _join(parts: list[Int8[Array, "r part"]]) -> Int8[Array, "r i"]:
    """Undoes `_split`."""
    if len(parts) == 1:
        return parts[0]
    num_rows = parts[0].shape[0]
    halves = [part.reshape(num_rows, -1, _HALF) for part in parts]
    return jnp.stack(halves, axis=2).reshape(num_rows, -1)

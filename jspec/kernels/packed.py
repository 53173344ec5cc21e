"""Kernels that stay packed as in GGUF files (llama.cpp's formats), and their products.

A block holds the codes of 32 or 256 inputs of one output, and the scales of every 16 or 32 of them.
Its bytes are kept, but the blocks of 16 outputs are laid out side by side, element by element:

    file    output 0: d s s s … c c c c …   output 1: d s s s … c c c c …   …
    strip   d d d … d  s s s … s  …  c c c … c  …      (16 of a kind, then of the next)

So a vector register holds the same element of 16 outputs, and the C++ decodes them together. Where
there is no C++ for the processor or device, XLA decodes the weights, and multiplies, unless a
kernel of the GPU has won (see `contest`).

A weight is factor · code - minimum. The layouts are those of llama.cpp's ggml-common.h.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Float32, Int, Int32, UInt8

from jspec.kernels import library
from jspec.kernels.backend import backend, dot

STRIP = 16  # outputs side by side
_CHUNK_BYTES = 1 << 20  # packed at once
_ALIGNMENT = 64  # bytes; JAX on CPU takes an array that begins at a multiple of this as its own


class Format(NamedTuple):
    """How a block is laid out and decoded.

    Attributes:
      inputs: of a block.
      fields: (bytes of an element, number of elements) of each part of a block, in order.
      decode: blocks uint8 [..., bytes] -> float32 [..., inputs].
    """

    inputs: int
    fields: Sequence[tuple[int, int]]
    decode: Callable[[Array], Array]

    @property
    def num_bytes(self) -> int:
        """Bytes of a block."""
        return sum(size * count for size, count in self.fields)


def _halves(blocks: Array, begin: int) -> Array:
    """Returns the float16 number at a byte of each block, [... 1], in float32."""
    half = jax.lax.bitcast_convert_type(blocks[..., begin : begin + 2], jnp.float16)
    return half[..., None].astype(jnp.float32)


def _bits(values: Array, shift: int, num_bits: int) -> Array:
    mask = jnp.uint8((1 << num_bits) - 1)
    return (values >> jnp.uint8(shift)) & mask


def _nibbles(values: Array) -> Array:
    """Returns the low halves of the bytes of each run, and then the high ones."""
    return jnp.concatenate([_bits(values, 0, 4), _bits(values, 4, 4)], axis=-1)


def _decode_q4(blocks: Array, *, has_minimum: bool) -> Array:
    codes = _nibbles(blocks[..., -16:]).astype(jnp.float32)
    if has_minimum:
        return codes * _halves(blocks, 0) + _halves(blocks, 2)
    return (codes - 8) * _halves(blocks, 0)


def _decode_q5(blocks: Array, *, has_minimum: bool) -> Array:
    fifths = [_bits(blocks[..., -20 + i // 8], i % 8, 1) for i in range(32)]
    codes = _nibbles(blocks[..., -16:]) | (jnp.stack(fifths, axis=-1) << jnp.uint8(4))
    if has_minimum:
        return codes.astype(jnp.float32) * _halves(blocks, 0) + _halves(blocks, 2)
    return (codes.astype(jnp.float32) - 16) * _halves(blocks, 0)


def _decode_q8_0(blocks: Array) -> Array:
    codes = jax.lax.bitcast_convert_type(blocks[..., 2:], jnp.int8)
    return codes.astype(jnp.float32) * _halves(blocks, 0)


def _scaled(codes: Array, factors: Array, minimums: Array | None = None) -> Array:
    """Returns codes [... 256] times the factor of their group, minus its minimum."""
    grouped = codes.astype(jnp.float32).reshape(*factors.shape, -1)
    weights = grouped * factors[..., None]
    if minimums is not None:
        weights -= minimums[..., None]
    return weights.reshape(codes.shape)


def _six_bit_scales(blocks: Array) -> tuple[Array, Array]:
    """Returns the factors and minimums of the 8 groups of Q4_K and Q5_K, both [... 8]."""
    first, second, third = (blocks[..., 4 + 4 * i : 8 + 4 * i] for i in range(3))
    top = jnp.uint8(4)
    late = _bits(third, 0, 4) | (_bits(first, 6, 2) << top)
    late_minimum = _bits(third, 4, 4) | (_bits(second, 6, 2) << top)
    factors = jnp.concatenate([_bits(first, 0, 6), late], axis=-1).astype(jnp.float32)
    minimums = jnp.concatenate([_bits(second, 0, 6), late_minimum], axis=-1).astype(jnp.float32)
    return factors * _halves(blocks, 0), minimums * _halves(blocks, 2)


def _groups(blocks: Array, begin: int, bytes_a_run: int, shifts: Sequence[int], bits: int) -> Array:
    """Returns codes: of each run of bytes those at the first shift, then those at the next."""
    num_runs = 256 // (bytes_a_run * len(shifts))
    runs = blocks[..., begin : begin + num_runs * bytes_a_run]
    runs = runs.reshape(*blocks.shape[:-1], num_runs, 1, bytes_a_run)
    codes = jnp.concatenate([_bits(runs, shift, bits) for shift in shifts], axis=-2)
    return codes.reshape(*blocks.shape[:-1], 256)


def _decode_q4_k(blocks: Array) -> Array:
    return _scaled(_groups(blocks, 16, 32, (0, 4), 4), *_six_bit_scales(blocks))


def _decode_q5_k(blocks: Array) -> Array:
    fifths = _groups(blocks, 16, 32, range(8), 1) << jnp.uint8(4)
    return _scaled(_groups(blocks, 48, 32, (0, 4), 4) | fifths, *_six_bit_scales(blocks))


def _decode_q6_k(blocks: Array) -> Array:
    low = _groups(blocks, 0, 64, (0, 4), 4)
    high = _groups(blocks, 128, 32, (0, 2, 4, 6), 2) << jnp.uint8(4)
    factors = jax.lax.bitcast_convert_type(blocks[..., 192:208], jnp.int8).astype(jnp.float32)
    codes = (low | high).astype(jnp.float32) - 32
    return _scaled(codes, factors * _halves(blocks, 208))


def _decode_q2_k(blocks: Array) -> Array:
    factors = _bits(blocks[..., :16], 0, 4).astype(jnp.float32) * _halves(blocks, 80)
    minimums = _bits(blocks[..., :16], 4, 4).astype(jnp.float32) * _halves(blocks, 82)
    return _scaled(_groups(blocks, 16, 32, (0, 2, 4, 6), 2), factors, minimums)


def _decode_q3_k(blocks: Array) -> Array:
    low, high = blocks[..., 96:104], blocks[..., 104:108]
    fours = _nibbles(low)
    twos = jnp.concatenate([_bits(high, shift, 2) for shift in (0, 2, 4, 6)], axis=-1)
    factors = (fours | (twos << jnp.uint8(4))).astype(jnp.float32) - 32
    codes = _groups(blocks, 32, 32, (0, 2, 4, 6), 2)
    codes |= _groups(blocks, 0, 32, range(8), 1) << jnp.uint8(2)
    return _scaled(codes.astype(jnp.float32) - 4, factors * _halves(blocks, 108))


# By the name that GGUF gives it, in lower case.
FORMATS = {
    "q4_0": Format(32, ((2, 1), (4, 4)), functools.partial(_decode_q4, has_minimum=False)),
    "q4_1": Format(32, ((2, 2), (4, 4)), functools.partial(_decode_q4, has_minimum=True)),
    "q5_0": Format(32, ((2, 1), (4, 1), (4, 4)), functools.partial(_decode_q5, has_minimum=False)),
    "q5_1": Format(32, ((2, 2), (4, 1), (4, 4)), functools.partial(_decode_q5, has_minimum=True)),
    "q8_0": Format(32, ((2, 1), (4, 8)), _decode_q8_0),
    "q2_k": Format(256, ((1, 16), (4, 16), (2, 2)), _decode_q2_k),
    "q3_k": Format(256, ((4, 8), (4, 16), (1, 12), (2, 1)), _decode_q3_k),
    "q4_k": Format(256, ((2, 2), (1, 12), (4, 32)), _decode_q4_k),
    "q5_k": Format(256, ((2, 2), (1, 12), (4, 8), (4, 32)), _decode_q5_k),
    "q6_k": Format(256, ((4, 32), (4, 16), (1, 16), (2, 1)), _decode_q6_k),
}


class PackedKernel(struct.PyTreeNode):
    """A packed kernel, which replaces a float array [*out, *in] in the parameter dict.

    Attributes:
      strips: each the blocks of 16 outputs, the last padded with zeros, [s bytes].
      kind: the format, a key of `FORMATS`.
      shape: of the float array.
      dtype: the model's, bfloat16 or float32, to which a product's rows are rounded.
      takes_bytes: whether a product's rows are rounded to bytes; see `round_to_bytes`.
    """

    strips: UInt8[Array, "s bytes"]
    kind: str = struct.field(pytree_node=False)
    shape: tuple[int, ...] = struct.field(pytree_node=False)
    dtype: Any = struct.field(pytree_node=False)
    takes_bytes: bool = struct.field(pytree_node=False, default=False)

    def astype(self, dtype: jax.typing.DTypeLike) -> "PackedKernel":
        """Returns the kernel of the same model in another type: the weights are the same."""
        return self.replace(dtype=jnp.dtype(dtype))


class JoinedKernel(struct.PyTreeNode):
    """A kernel whose outputs have different formats, as the queries, keys and values of one layer.

    Attributes:
      parts: the outputs of each format, [o_i i].
      order: of each output, its place among those of all parts, [o].
      shape: of the float array [*out, *in] that the kernel replaces.
    """

    parts: tuple[PackedKernel | Float[Array, "o i"], ...]
    order: Int32[Array, "o"]
    shape: tuple[int, ...] = struct.field(pytree_node=False)

    @property
    def dtype(self) -> Any:
        """The model's; see `PackedKernel`."""
        return self.parts[0].dtype

    def astype(self, dtype: jax.typing.DTypeLike) -> "JoinedKernel":
        """Returns the kernel of the same model in another type."""
        return self.replace(parts=tuple(part.astype(dtype) for part in self.parts))


def pack(
    tensors: Sequence[np.ndarray],
    kind: str,
    order: np.ndarray,
    release: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """Lays blocks of a file out in strips, without JAX.

    Args:
      tensors: the blocks of each output of one or several tensors, uint8 [o_i bytes].
      kind: their format, a key of `FORMATS`.
      order: which of all their outputs comes first, second ..., [o].
      release: called from time to time, lets go of the memory that the file's pages take.

    Returns:
      The strips, uint8 [s bytes], in memory that JAX can use without copying it.
    """
    library.begin_packed(kind)  # it will soon be multiplied
    num_strips, row_bytes = -(-len(order) // STRIP), tensors[0].shape[1]
    strips = _empty_strips(num_strips, STRIP * row_bytes)
    padding = np.zeros(row_bytes, np.uint8)
    addresses = np.full(num_strips * STRIP, padding.ctypes.data, np.uint64)
    addresses[: len(order)] = np.concatenate([_row_addresses(tensor) for tensor in tensors])[order]
    step = max(1, _CHUNK_BYTES // strips.shape[1])
    for first in range(0, num_strips, step):
        chunk = strips[first : first + step]
        _pack_rows(addresses[first * STRIP :][: len(chunk) * STRIP], kind, chunk)
        release()
    return strips


def _empty_strips(num_strips: int, num_bytes: int) -> np.ndarray:
    space = np.empty(num_strips * num_bytes + _ALIGNMENT, np.uint8)
    begin = -space.ctypes.data % _ALIGNMENT
    return space[begin : begin + num_strips * num_bytes].reshape(num_strips, num_bytes)


def round_strips(strips: UInt8[np.ndarray, "s bytes"], kind: str) -> UInt8[np.ndarray, "s n"]:
    """Rounds strips of a format to Q4_0, in C++; see `has_fast_packed_products`.

    Returns:
      The strips, in memory that JAX can use without copying it.
    """
    function = library.host_function(f"round_{kind}")
    assert function is not None
    num_blocks = strips.shape[1] // (STRIP * FORMATS[kind].num_bytes)
    rounded_blocks = num_blocks * FORMATS[kind].inputs // FORMATS["q4_0"].inputs
    rounded = _empty_strips(len(strips), STRIP * rounded_blocks * FORMATS["q4_0"].num_bytes)
    total = ctypes.c_int64(num_blocks * len(strips))
    function(ctypes.c_void_p(strips.ctypes.data), total, ctypes.c_void_p(rounded.ctypes.data))
    return rounded


def _row_addresses(tensor: np.ndarray) -> np.ndarray:
    first, stride = np.uint64(tensor.ctypes.data), np.uint64(tensor.strides[0])
    return first + stride * np.arange(len(tensor), dtype=np.uint64)


def _pack_rows(addresses: np.ndarray, kind: str, strips: np.ndarray) -> None:
    """Writes strips of the rows at those addresses, 16 a strip."""
    row_bytes = strips.shape[1] // STRIP
    fields = np.array(FORMATS[kind].fields, np.int32)
    if function := library.host_function("pack"):
        rows_at, fields_at, to = (
            ctypes.c_void_p(array.ctypes.data) for array in (addresses, fields, strips)
        )
        sizes = len(strips), row_bytes, len(fields)
        num_strips, row_bytes, num_fields = map(ctypes.c_int64, sizes)
        function(rows_at, num_strips, row_bytes, fields_at, num_fields, to)
    else:
        kind_of = ctypes.POINTER(ctypes.c_uint8)
        starts = [ctypes.cast(int(place), kind_of) for place in addresses]
        rows = [np.ctypeslib.as_array(start, (row_bytes,)) for start in starts]
        strips[...] = _pack_by_numpy(np.stack(rows), fields)


def _pack_by_numpy(rows: np.ndarray, fields: np.ndarray) -> np.ndarray:
    """Returns whole strips of rows; the reference of the C++."""
    num_bytes = int((fields[:, 0] * fields[:, 1]).sum())
    blocks = rows.reshape(-1, STRIP, rows.shape[1] // num_bytes, num_bytes)
    parts, begin = [], 0
    for size, count in fields.tolist():
        part = blocks[..., begin : begin + size * count]
        part = part.reshape(*part.shape[:3], count, size).transpose(0, 2, 3, 1, 4)
        parts.append(part.reshape(*part.shape[:2], -1))
        begin += size * count
    return np.concatenate(parts, axis=-1).reshape(len(blocks), -1)


def packed_product(rows: Float[Array, "r i"], kernel: PackedKernel) -> Float32[Array, "r o"]:
    """Returns rows · kernelᵀ, [r o], in float32; by C++ a row's result depends on no other row."""
    rows = rows.astype(kernel.dtype)
    num_outputs = int(np.prod(kernel.shape)) // rows.shape[1]
    name = f"{kernel.kind}_product"
    if kernel.takes_bytes:
        rows, name = rows.astype(jnp.float32), f"{kernel.kind}_byte_product"

    def reference(rows: Array, strips: Array) -> Array:
        rows = round_to_bytes(rows) if kernel.takes_bytes else rows
        # A CPU needs them exact; others multiply float32 ten times more slowly.
        rows = rows if backend() == "cpu" else rows.astype(kernel.dtype)
        # Weights that do not depend on the rows would be decoded once, before the decoding loop,
        # and would lie in memory as floats.
        rows, strips = jax.lax.optimization_barrier((rows, strips))
        return dot(rows, unpack(strips, kernel.kind)[:num_outputs].astype(rows.dtype))

    if library.is_packed_available(kernel.kind):
        result = library.floats(rows.shape[0], num_outputs)
        return library.call(name, reference, result, rows, kernel.strips)
    return reference(rows, kernel.strips)


def round_to_bytes(rows: Float32[Array, "r i"]) -> Float32[Array, "r i"]:
    """Returns rows rounded to integers up to 127, in units of each 32 inputs' largest / 127.

    The reference of the C++. llama.cpp rounds the inputs of its products so.
    """
    groups = rows.reshape(len(rows), -1, 32)
    largest = jnp.max(jnp.abs(groups), axis=2, keepdims=True)
    units = jnp.where(largest > 0, 127 / largest, 0.0)
    return (jnp.round(groups * units) * (largest / 127)).reshape(rows.shape)


def has_fast_packed_products() -> bool:
    """Returns whether packed kernels are as fast as their size promises, on the default device."""
    return library.has_packed()


def packed_rows(table: PackedKernel, ids: Int[Array, "b t"]) -> Float32[Array, "b t d"]:
    """Returns rows of a table, [b t d], in float32."""
    form, row_bytes = FORMATS[table.kind], table.strips.shape[1] // STRIP
    num_blocks = row_bytes // form.num_bytes

    def reference(strips: Array, ids: Array, fields: Any) -> Array:
        del fields
        blocks = as_in_file(strips[ids // STRIP], table.kind)
        row = jnp.take_along_axis(blocks, (ids % STRIP)[:, None, None, None], axis=1)
        return row.reshape(len(ids), row_bytes)

    flat = jnp.clip(ids.reshape(-1).astype(jnp.int32), 0, table.shape[0] - 1)
    operands = table.strips, flat, np.array(form.fields, np.int32)
    if library.is_available():  # XLA would gather them on several threads: see `rows.cc`
        result = jax.ShapeDtypeStruct((ids.size, row_bytes), jnp.uint8)
        blocks = library.call("packed_rows", reference, result, *operands)
    else:
        blocks = reference(*operands)
    decoded = form.decode(blocks.reshape(ids.size, num_blocks, form.num_bytes))
    return decoded.reshape(*ids.shape, num_blocks * form.inputs)


def unpack(strips: UInt8[Array, "s bytes"], kind: str) -> Float32[Array, "o i"]:
    """Returns the weights of strips, in float32; those of padding are zeros."""
    weights = FORMATS[kind].decode(as_in_file(strips, kind))
    return weights.reshape(len(strips) * STRIP, -1)


def as_in_file(strips: UInt8[Array, "s bytes"], kind: str) -> UInt8[Array, "s 16 blocks size"]:
    """Returns the blocks of strips, those of each output together."""
    form, parts, begin = FORMATS[kind], [], 0
    blocks = strips.reshape(len(strips), -1, STRIP * form.num_bytes)
    for size, count in form.fields:
        end = begin + size * count
        part = blocks[..., STRIP * begin : STRIP * end]
        part = part.reshape(*blocks.shape[:2], count, STRIP, size)
        part = part.transpose(0, 3, 1, 2, 4)  # [s 16 blocks count size]
        parts.append(part.reshape(*part.shape[:3], -1))
        begin = end
    return jnp.concatenate(parts, axis=-1)

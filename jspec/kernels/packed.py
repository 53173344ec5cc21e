"""Kernels that stay packed as in GGUF files (llama.cpp's formats), and their products.

A block holds the codes of 32 or 256 inputs of one output, and the scales of every 16 or 32 of them.
Its bytes are kept, but the blocks of 16 outputs are laid out side by side, element by element:

    file    output 0: d s s s … c c c c …   output 1: d s s s … c c c c …   …
    strip   d d d … d  s s s … s  …  c c c … c  …      (16 of each, then 16 of the next)

So a vector register holds the same element of 16 outputs, and the C++ decodes them together. Where
there is no C++ for the processor or device, XLA decodes the weights, and multiplies.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Float32, Int, UInt8

from jspec.kernels import library
from jspec.kernels.packed_formats import FORMATS
from jspec.kernels.precision import exact_float32

STRIP = 16  # outputs side by side


class PackedKernel(struct.PyTreeNode):
    """A packed kernel, which replaces a float array [*out, *in] in the parameter dict.

    Attributes:
      strips: the blocks of 16 outputs each, the last ones padded with zeros, [s bytes].
      kind: the format, a key of `FORMATS`.
      shape: of the float array.
      dtype: the model's, bfloat16 or float32, to which a product's rows are rounded.
    """

    strips: UInt8[Array, "s bytes"]
    kind: str = struct.field(pytree_node=False)
    shape: tuple[int, ...] = struct.field(pytree_node=False)
    dtype: Any = struct.field(pytree_node=False)

    def astype(self, dtype: jax.typing.DTypeLike) -> "PackedKernel":
        """Returns the kernel of the same model in another type: the weights are the same."""
        return self.replace(dtype=jnp.dtype(dtype))


def pack(blocks: UInt8[Array, "o bytes"] | np.ndarray, kind: str) -> UInt8[Array, "s bytes16"]:
    """Lays a file's blocks out in strips.

    Args:
      blocks: those of each output, [o bytes].
      kind: the format, a key of `FORMATS`.
    """
    fields = np.array(FORMATS[kind].fields, np.int32)
    if not library.is_available():
        return _pack_by_xla(jnp.asarray(blocks), fields)
    shape = -(-blocks.shape[0] // STRIP), STRIP * blocks.shape[1]
    result = jax.ShapeDtypeStruct(shape, jnp.uint8)
    return library.call("pack", _pack_by_xla, result, jnp.asarray(blocks), jnp.asarray(fields))


def _pack_by_xla(blocks: Array, fields: np.ndarray) -> Array:
    """Does the same in JAX."""
    blocks = jnp.pad(blocks, [(0, -len(blocks) % STRIP), (0, 0)])
    num_bytes = int((fields[:, 0] * fields[:, 1]).sum())
    grouped, parts, begin = (
        blocks.reshape(-1, STRIP, blocks.shape[1] // num_bytes, num_bytes),
        [],
        0,
    )
    for size, count in fields.tolist():
        part = grouped[..., begin : begin + size * count]
        part = part.reshape(*part.shape[:3], count, size).transpose(0, 2, 3, 1, 4)
        parts.append(part.reshape(*part.shape[:2], -1))
        begin += size * count
    return jnp.concatenate(parts, axis=-1).reshape(len(grouped), -1)


def packed_product(rows: Float[Array, "r i"], kernel: PackedKernel) -> Float32[Array, "r o"]:
    """Returns rows · kernelᵀ, [r o], in float32; by C++ a row's result depends on no other row."""
    rows = rows.astype(kernel.dtype)
    num_outputs = _num_outputs(kernel, rows.shape[1])
    if library.is_available() and library.has_packed():
        result = library.floats(rows.shape[0], num_outputs)
        return library.call(
            f"{kernel.kind}_product", _reference(kernel, num_outputs), result, rows, kernel.strips
        )
    return _reference(kernel, num_outputs)(rows, kernel.strips)


def _num_outputs(kernel: PackedKernel, num_inputs: int) -> int:
    return int(np.prod(kernel.shape)) // num_inputs


def _reference(kernel: PackedKernel, num_outputs: int) -> Callable[[Array, Array], Array]:
    """Returns the product in JAX, as a function of rows and strips."""

    def product(rows: Array, strips: Array) -> Array:
        weights = unpack(strips, kernel.kind)[:num_outputs].astype(rows.dtype)
        return jax.lax.dot_general(
            rows,
            weights,
            (((1,), (1,)), ((), ())),
            precision=exact_float32(rows.dtype),
            preferred_element_type=jnp.float32,
        )

    return product


def packed_rows(table: PackedKernel, ids: Int[Array, "b t"]) -> Float32[Array, "b t d"]:
    """Returns rows of a table, [b t d], in float32."""
    flat = ids.reshape(-1)
    rows = unpack(table.strips[flat // STRIP], table.kind).reshape(flat.size, STRIP, -1)
    chosen = jnp.take_along_axis(rows, (flat % STRIP)[:, None, None], axis=1)
    return chosen.reshape(*ids.shape, -1)


def unpack(strips: UInt8[Array, "s bytes"], kind: str) -> Float32[Array, "o i"]:
    """Returns the weights of strips, in float32; those of padding are zeros."""
    form, parts, begin = FORMATS[kind], [], 0
    blocks = strips.reshape(len(strips), -1, STRIP * form.num_bytes)
    for size, count in form.fields:
        end = begin + size * count
        part = blocks[..., STRIP * begin : STRIP * end]
        part = part.reshape(*blocks.shape[:2], count, STRIP, size)
        part = part.transpose(0, 3, 1, 2, 4)  # [s 16 blocks count size]
        parts.append(part.reshape(*part.shape[:3], -1))
        begin = end
    weights = form.decode(jnp.concatenate(parts, axis=-1))
    return weights.reshape(len(strips) * STRIP, -1)

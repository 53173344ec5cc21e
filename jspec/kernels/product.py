"""The product of a few rows with a kernel, the operation that takes most of a decoding step."""

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from jspec.kernels import library
from jspec.kernels.backend import backend
from jspec.kernels.candidates import compute_product
from jspec.kernels.packed import JoinedKernel, PackedKernel, packed_product, packed_rows
from jspec.kernels.precision import dot, padded
from jspec.kernels.quantized import QuantizedKernel, quantized_product, quantized_rows
from jspec.kernels.split import MODEL_AXIS, SplitKernel

# Kernels that are stored in fewer bits than floats, as several arrays or as one of bytes.
CompactKernel: TypeAlias = QuantizedKernel | PackedKernel | JoinedKernel
Kernel: TypeAlias = Float[Array, "..."] | CompactKernel | SplitKernel

# Up to this many rows the C++ is faster than XLA on any CPU, but for some float32 products near the
# limit. It is also more exact: XLA's float32 logits are twice as far from those of float64.
_FEW_ROWS = {jnp.dtype(jnp.bfloat16): 16, jnp.dtype(jnp.float32): 64}
_MANY_ROWS = 512  # the same limit where the processor multiplies pairs of bfloat16 numbers
NARROW_CHUNK, _WIDE_CHUNK = 64, 256  # tokens of a prompt that one call reads


def product(rows: Float[Array, "r i"], kernel: Kernel) -> Float32[Array, "r o"]:
    """Returns rows · kernelᵀ, summed in float32.

    By C++ a row's result does not depend on the rows beside it, so that a token's logits are the
    same in a decoding step and in a verify call.

    Rows are rounded to the kernel's type. A kernel is [o i], one output a row, as in PyTorch, which
    is the faster layout for few rows.
    """
    if isinstance(kernel, SplitKernel):
        return kernel.join(product(rows, kernel.part))
    if isinstance(kernel, QuantizedKernel):
        return quantized_product(rows, kernel)
    if isinstance(kernel, PackedKernel):
        return compute_product(packed_product, rows, kernel)
    if isinstance(kernel, JoinedKernel):
        parts = jnp.concatenate([product(rows, part) for part in kernel.parts], axis=1)
        return parts.at[:, kernel.order].get(mode="promise_in_bounds")
    return float_product(rows.astype(jnp.float32), kernel)


def table_rows(table: Kernel, ids: Int[Array, "b t"]) -> Float[Array, "b t d"]:
    """Returns rows of a table [v d], in its type; those of a compact table in float32."""
    if isinstance(table, SplitKernel):
        places, is_own = table.find(ids)
        rows = table_rows(table.part, places)
        # One device has the row, and the others add zeros: the sum is exact.
        return jax.lax.psum(jnp.where(is_own[..., None], rows, jnp.zeros_like(rows)), MODEL_AXIS)
    if isinstance(table, QuantizedKernel):
        return quantized_rows(table, ids)
    if isinstance(table, PackedKernel):
        return packed_rows(table, ids)
    assert not isinstance(table, JoinedKernel)  # a table is one tensor
    return _float_rows(table, ids)


@library.in_cpp(
    "table_rows",
    lambda table, ids: jax.ShapeDtypeStruct((*ids.shape, table.shape[1]), table.dtype),
    lambda table, ids: table.dtype in _FEW_ROWS and ids.dtype == jnp.int32 and len(table) > 0,
)
def _float_rows(table: Float[Array, "v d"], ids: Int[Array, "b t"]) -> Float[Array, "b t d"]:
    return table[ids]


@library.in_cpp(
    "product",
    lambda rows, kernel: library.floats(rows.shape[0], kernel.shape[0]),
    lambda rows, kernel: rows.shape[0] <= _most_native_rows(kernel.dtype),
)
def float_product(
    rows: Float32[Array, "r i"], kernel: Float[Array, "o i"]
) -> Float32[Array, "r o"]:
    """Does the same for float32 rows and a kernel of floats."""
    num_rows = rows.shape[0]
    rows = rows.astype(kernel.dtype)
    # XLA on CPU is ten times slower with one bfloat16 row than with two.
    if num_rows == 1 and rows.dtype == jnp.bfloat16 and backend() == "cpu":
        rows = jnp.concatenate([rows, jnp.zeros_like(rows)])
    return dot(padded(rows), kernel)[:num_rows]


def _most_native_rows(dtype: jnp.dtype) -> int:
    """Returns up to how many rows a product with a kernel of that type is computed in C++."""
    if dtype == jnp.bfloat16 and library.has_pairs():
        return _MANY_ROWS
    return _FEW_ROWS.get(dtype, 0)


def prefill_widths(kernel: Kernel) -> tuple[int, ...]:
    """Returns the widths, in tokens, at which calls on chunks of a prompt are compiled.

    A wide call takes two and a half to four times as long as a narrow call. Where many rows are
    multiplied in C++, but not in tiles, it takes four times as long, and one width is enough. One
    of the model's kernels tells the type of all.
    """
    if isinstance(kernel, QuantizedKernel):
        is_one_enough = library.is_available()
    elif isinstance(kernel, PackedKernel):
        is_one_enough = library.has_packed()
    else:
        is_native = _most_native_rows(kernel.dtype) >= _WIDE_CHUNK
        is_one_enough = is_native and not library.has_tiles()
    return (NARROW_CHUNK,) if is_one_enough else (NARROW_CHUNK, _WIDE_CHUNK)

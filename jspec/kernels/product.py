"""The product of a few rows with a kernel, the operation that takes most of a decoding step.

Rows may each have a kernel of their own, by groups: a layer of experts. A table is a kernel too.
"""

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32

from jspec.kernels import library
from jspec.kernels.backend import backend, dot, exact_float32, padded
from jspec.kernels.candidates import compute_product
from jspec.kernels.packed import (
    STRIP,
    JoinedKernel,
    PackedKernel,
    as_in_file,
    pack,
    packed_product,
    packed_rows,
)
from jspec.kernels.quantized import QuantizedKernel, quantized_product, quantized_rows
from jspec.kernels.split import MODEL_AXIS, SplitKernel

# Kernels that are stored in fewer bits than floats, as several arrays or as one of bytes.
CompactKernel: TypeAlias = QuantizedKernel | PackedKernel | JoinedKernel
Kernel: TypeAlias = Float[Array, "..."] | CompactKernel | SplitKernel

# Up to this many rows the C++ is at least as fast as XLA, but for some float32 products near the
# limit. It is also more exact: XLA's float32 logits are twice as far from those of float64.
_MOST_ROWS = {jnp.dtype(jnp.bfloat16): 512, jnp.dtype(jnp.float32): 64}
CHUNK = 64  # tokens of a prompt that a call reads: a width that all models have
_SHORT_CHUNK, _WIDE_CHUNK = 16, 256
# Which axes are summed over, rows and kernels; which one of the rows is grouped, which of the
# kernels counts the groups.
_AXES = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])


def product(
    rows: Float[Array, "r i"], kernel: Kernel, *, may_compete: bool = True
) -> Float32[Array, "r o"]:
    """Returns rows · kernelᵀ, summed in float32.

    By C++ a row's result does not depend on the rows beside it, so that a token's logits are the
    same in a decoding step and in a verify call.

    Rows are rounded to the kernel's type. A kernel is [o i], one output a row, as in PyTorch, which
    is the faster layout for few rows. A part of a split kernel is always computed by XLA on a GPU,
    as `may_compete` says: its product would need a contest of its own.
    """
    if isinstance(kernel, SplitKernel):
        return kernel.join(product(rows, kernel.part, may_compete=False))
    if isinstance(kernel, QuantizedKernel):
        return quantized_product(rows, kernel)
    if isinstance(kernel, PackedKernel):
        if not may_compete:
            return packed_product(rows, kernel)
        return compute_product(packed_product, rows, kernel)
    if isinstance(kernel, JoinedKernel):
        outputs = [product(rows, part, may_compete=may_compete) for part in kernel.parts]
        parts = jnp.concatenate(outputs, axis=1)
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
    lambda table, ids: table.dtype in _MOST_ROWS and ids.dtype == jnp.int32 and len(table) > 0,
)
def _float_rows(table: Float[Array, "v d"], ids: Int[Array, "b t"]) -> Float[Array, "b t d"]:
    return table[ids]


@library.in_cpp(
    "product",
    lambda rows, kernel: library.floats(rows.shape[0], kernel.shape[0]),
    lambda rows, kernel: rows.shape[0] <= _MOST_ROWS.get(kernel.dtype, 0),
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


class ChunkWidths(NamedTuple):
    """The widths, in tokens, at which calls on chunks of a prompt are compiled.

    Attributes:
      narrow: of narrow calls.
      wide: of wide calls.
      fewest: tokens left, at least, for which a wide call takes no longer than narrow ones.
    """

    narrow: int
    wide: int
    fewest: int


def chunk_widths(kernel: Kernel) -> ChunkWidths:
    """Returns the widths for a model; any one of its kernels tells the type of all.

    A call on 256 tokens takes two and a half to four times as long as a call on 64. Where many rows
    are multiplied in C++, but not in tiles, the seconds of a call are in proportion to its tokens:
    then the fewer of them are padding, the better.
    """
    if isinstance(kernel, PackedKernel):
        is_proportional = library.has_packed()
    else:
        is_native = isinstance(kernel, QuantizedKernel) or kernel.dtype == jnp.bfloat16
        has_tiles = not isinstance(kernel, QuantizedKernel) and library.has_tiles()
        is_proportional = is_native and library.is_available() and not has_tiles
    if is_proportional:
        return ChunkWidths(_SHORT_CHUNK, CHUNK, CHUNK - _SHORT_CHUNK + 1)
    return ChunkWidths(CHUNK, _WIDE_CHUNK, 2 * CHUNK + 1)


# XLA on CPU multiplies every row by every kernel. For 64 rows of 16 experts that takes 20 times as
# long. The C++ reads only the kernels that have rows, each where it lies.
@library.in_cpp(
    "grouped_product", lambda rows, kernels, _: library.floats(rows.shape[0], kernels.shape[1])
)
def _grouped_product(
    rows: Float32[Array, "r i"], kernels: Float[Array, "e o i"], sizes: Int32[Array, "e"]
) -> Float32[Array, "r o"]:
    return jax.lax.ragged_dot_general(
        rows.astype(kernels.dtype), kernels, sizes, _AXES,
        precision=exact_float32(kernels.dtype), preferred_element_type=jnp.float32,
    )  # fmt: skip


def grouped_product(
    rows: Float32[Array, "r i"], kernels: Kernel, sizes: Int32[Array, "e"]
) -> Float32[Array, "r o"]:
    """Returns each row · its kernelᵀ, summed in float32.

    The first `sizes[0]` rows belong to the first kernel, the next `sizes[1]` to the second, and so
    on; the sizes add up to r. By C++ a row's result does not depend on the rows beside it.
    """
    if isinstance(kernels, SplitKernel):
        return kernels.join(_grouped_product(rows, kernels.part, sizes))
    return _grouped_product(rows, kernels, sizes)


def take_rows(kernel: Kernel, rows: Int[np.ndarray, "u"]) -> Kernel:
    """Returns the kernel [u i] of those rows of a kernel [o i], a copy of the same type.

    Each output has its own scales, so that the weights stay exactly the same.
    """
    if isinstance(kernel, PackedKernel):
        return _take_packed(kernel, rows)
    if isinstance(kernel, QuantizedKernel):
        multipliers = kernel.multipliers
        return kernel.replace(
            values=kernel.values[rows],
            scales=kernel.scales[rows],
            multipliers=None if multipliers is None else multipliers[rows],
            shape=(len(rows), *kernel.shape[1:]),
        )
    assert not isinstance(kernel, JoinedKernel | SplitKernel)  # a head is one tensor, and whole
    return kernel[jnp.asarray(rows)]


def _take_packed(kernel: PackedKernel, rows: Int[np.ndarray, "u"]) -> PackedKernel:
    # Outputs lie side by side in strips: these are taken apart, and the rows packed anew.
    strips, place = np.unique(rows // STRIP, return_inverse=True)
    blocks = np.asarray(as_in_file(kernel.strips[strips], kernel.kind))
    row_blocks = blocks[place, rows % STRIP].reshape(len(rows), -1)
    packed = pack([row_blocks], kernel.kind, np.arange(len(rows)))
    return kernel.replace(strips=jnp.asarray(packed), shape=(len(rows), *kernel.shape[1:]))

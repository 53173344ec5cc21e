"""The product of rows sorted by group with a kernel for each group: a layer of experts."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jspec.kernels.library import floats, in_cpp
from jspec.kernels.precision import exact_float32
from jspec.kernels.product import Kernel
from jspec.kernels.split import SplitKernel

# Which axes are summed over, rows and kernels; which one of the rows is grouped, which of the
# kernels counts the groups.
_AXES = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])


# XLA on CPU multiplies every row by every kernel. For 64 rows of 16 experts that takes 20 times as
# long. The C++ reads only the kernels that have rows, each where it lies.
@in_cpp("grouped_product", lambda rows, kernels, _: floats(rows.shape[0], kernels.shape[1]))
def _product(
    rows: Float32[Array, "r i"], kernels: Float[Array, "e o i"], sizes: Int32[Array, "e"]
) -> Float32[Array, "r o"]:
    return lax.ragged_dot_general(
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
        return kernels.join(_product(rows, kernels.part, sizes))
    return _product(rows, kernels, sizes)

"""Products of few rows in CUDA C++, with a norm before and a bias, gate or residual after.

A row's result does not depend on the rows beside it, nor on how many there are; see
`cuda/multiply.cuh`.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from jspec.kernels.packed import STRIP, PackedKernel
from jspec.kernels.packed_formats import FORMATS
from jspec.kernels.product import Kernel
from jspec.kernels.quantized import GROUP, QuantizedKernel

MOST_ROWS = 64  # every 16 read all weights; products of more are bound by arithmetic
# The numbers are those of `Activation` and `Storage` in cuda/product.cuh.
ACTIVATIONS = {None: 0, "silu": 1, "gelu_tanh": 2}
_BFLOAT16, _INT8, _INT4 = 0, 1, 2
PACKED = {"q4_0": 3, "q5_0": 4, "q8_0": 5, "q4_k": 6, "q5_k": 7, "q6_k": 8}


def takes_kernel(kernel: Kernel, num_inputs: int) -> bool:
    """Returns whether `multiply` takes a kernel: of a bfloat16 model, a known format, whole tiles.

    It then has a multiple of 32 outputs, two tiles, so that it can be gates and what they multiply.
    """
    if isinstance(kernel, PackedKernel):
        inputs = FORMATS[kernel.kind].inputs if kernel.kind in PACKED else 0
    elif isinstance(kernel, QuantizedKernel) or hasattr(kernel, "ndim"):
        inputs = GROUP
    else:
        inputs = 0
    if not inputs or kernel.dtype != jnp.bfloat16 or num_inputs % inputs:
        return False
    return math.prod(kernel.shape) % (2 * STRIP * num_inputs) == 0


class Fused(NamedTuple):
    """What is computed with a product: residual + scale · act(norm(rows) · kernelᵀ + bias).

    Attributes:
      norm: the scales [i] of an RMSNorm (arXiv 1910.07467) of the rows, which is summed in float32.
      epsilon: of the norm.
      bias: of the outputs.
      activation: of the gate; then the first half of the outputs are gates and the second what they
        multiply, and the result has half as many.
      residual: what the result is added to.
      scale: of the result, before the residual is added.
      dtype: of the result, float32 or bfloat16.
    """

    norm: Float[Array, "i"] | None = None
    epsilon: float = 0.0
    bias: Float[Array, "..."] | None = None
    activation: str | None = None
    residual: Float32[Array, "r p"] | None = None
    scale: float = 1.0
    dtype: Any = jnp.float32


NOTHING_FUSED = Fused()


def multiply(
    rows: Float[Array, "r i"],
    kernel: Kernel,
    fused: Fused = NOTHING_FUSED,
    *,
    overlaps: bool = False,
) -> Float[Array, "r p"]:
    """Returns the product of rows, and what is fused with it.

    Rows, float32 or bfloat16, are rounded to bfloat16 for the product, after the norm.

    Args:
      rows: the inputs.
      kernel: that `takes_kernel` takes.
      fused: what is computed with the product.
      overlaps: whether the product may start, and fetch its weights, while the kernel before it on
        the GPU still runs.

    Raises:
      ValueError: the activation is not in `ACTIVATIONS`.
    """
    activation, bias, residual = fused.activation, fused.bias, fused.residual
    if activation not in ACTIVATIONS:
        raise ValueError(f"expected an activation among {[*ACTIVATIONS]}, got {activation!r}")
    num_rows, num_inputs = rows.shape
    num_outputs = math.prod(kernel.shape) // num_inputs // (1 if activation is None else 2)
    storage, weights, units, multipliers = storage_of(kernel, num_inputs)
    optional = units, multipliers, fused.norm, None if bias is None else bias.reshape(-1), residual
    # XLA has no operands that are left out: they are empty.
    empty = np.zeros([0], np.float32)
    operands = [empty if operand is None else operand for operand in optional]
    # The result may take the residual's memory: an element is read by the thread that writes it.
    # XLA copies a residual that is needed later, or is the rows, too.
    is_in_place = residual is not None and jnp.dtype(fused.dtype) == residual.dtype
    call = jax.ffi.ffi_call(
        "jspec_cuda_product",
        jax.ShapeDtypeStruct((num_rows, num_outputs), fused.dtype),
        input_output_aliases={1 + len(operands): 0} if is_in_place else None,
    )
    return call(
        rows,
        weights,
        *operands,
        storage=np.int32(storage),
        activation=np.int32(ACTIVATIONS[activation]),
        epsilon=np.float32(fused.epsilon),
        scale=np.float32(fused.scale),
        takes_bytes=isinstance(kernel, PackedKernel) and kernel.takes_bytes,
        overlaps=overlaps,
    )


def storage_of(
    kernel: Kernel, num_inputs: int
) -> tuple[int, jax.Array, jax.Array | None, jax.Array | None]:
    """Returns the number of its format, the weights, and the units and multipliers of integers."""
    if isinstance(kernel, PackedKernel):
        return PACKED[kernel.kind], kernel.strips, None, None
    if isinstance(kernel, QuantizedKernel):
        storage = _INT8 if kernel.multipliers is None else _INT4
        return storage, kernel.values, kernel.scales, kernel.multipliers
    return _BFLOAT16, kernel.reshape(-1, num_inputs), None, None  # type: ignore[union-attr]

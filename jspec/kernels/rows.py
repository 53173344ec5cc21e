"""A kernel of some of a kernel's outputs."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jspec.kernels.product import Kernel
from jspec.kernels.quantized import QuantizedKernel


def take_rows(kernel: Kernel, rows: Int[np.ndarray, "u"]) -> Kernel:
    """Returns the kernel [u i] of those rows of a kernel [o i], a copy of the same type.

    Each output has its own scale and multipliers, so that the weights stay exactly the same.
    """
    if not isinstance(kernel, QuantizedKernel):
        return kernel[jnp.asarray(rows)]
    multipliers = kernel.multipliers
    return kernel.replace(
        values=kernel.values[rows],
        scales=kernel.scales[rows],
        multipliers=None if multipliers is None else multipliers[rows],
        shape=(len(rows), *kernel.shape[1:]),
    )

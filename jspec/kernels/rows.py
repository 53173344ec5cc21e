"""A kernel of some of a kernel's outputs."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jspec.kernels.packed import STRIP, JoinedKernel, PackedKernel, as_in_file, pack
from jspec.kernels.product import Kernel
from jspec.kernels.quantized import QuantizedKernel
from jspec.kernels.split import SplitKernel


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

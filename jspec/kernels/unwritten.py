"""Zeros that need not be written where nobody will read them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from jspec.kernels.library import call, floats, is_available


def zeros_if(is_read: Bool[Array, ""] | bool, *shape: int) -> Float32[Array, "..."]:
    """Returns zeros; where nobody is to read them, C++ leaves that memory as it finds it.

    The drafts of 32 rows have 44 MB of distributions, which are of no use at temperature 0.
    """

    def zeros() -> Float32[Array, "..."]:
        return jnp.zeros(shape, jnp.float32)

    if not is_available():
        return zeros()
    return jax.lax.cond(is_read, zeros, lambda: call("unwritten", zeros, floats(*shape)))

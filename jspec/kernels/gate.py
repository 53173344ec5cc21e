"""The gate of a SwiGLU feed-forward layer (arXiv 2002.05202)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from jspec.kernels import library


def swiglu(gate_up: Float32[Array, "b t 2 f"]) -> Float32[Array, "b t f"]:
    """Returns silu(gate) · up, where gate and up are the two halves of axis 2."""
    if not library.is_available():
        return swiglu_by_xla(gate_up)
    b, t, _, f = gate_up.shape
    result = jax.ShapeDtypeStruct((b, t, f), jnp.float32)
    return library.call("swiglu", swiglu_by_xla, result, gate_up)


def swiglu_by_xla(gate_up: Float32[Array, "b t 2 f"]) -> Float32[Array, "b t f"]:
    """Does the same in JAX; XLA on CPU uses one thread for it, however many rows there are."""
    return jax.nn.silu(gate_up[:, :, 0]) * gate_up[:, :, 1]

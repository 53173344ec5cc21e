"""The gates of SwiGLU and GeGLU feed-forward layers (arXiv 2002.05202)."""

import jax
from jaxtyping import Array, Float32

from jspec.kernels.library import floats, in_cpp


# XLA on CPU uses one thread for it, however many rows there are.
@in_cpp("swiglu", lambda gate_up: floats(*gate_up.shape[:2], gate_up.shape[3]))
def swiglu(gate_up: Float32[Array, "b t 2 f"]) -> Float32[Array, "b t f"]:
    """Returns silu(gate) · up, where gate and up are the two halves of axis 2."""
    return jax.nn.silu(gate_up[:, :, 0]) * gate_up[:, :, 1]


def geglu(gate_up: Float32[Array, "b t 2 f"]) -> Float32[Array, "b t f"]:
    """Returns gelu(gate) · up, with the tanh approximation of gelu (arXiv 1606.08415)."""
    return jax.nn.gelu(gate_up[:, :, 0], approximate=True) * gate_up[:, :, 1]

"""The gate of a SwiGLU feed-forward layer (arXiv 2002.05202)."""

import jax
from jaxtyping import Array, Float32

from jspec.kernels.library import in_cpp


@in_cpp("swiglu")  # XLA on CPU uses one thread for it, however many rows there are
def swiglu(gate_up: Float32[Array, "b t 2 f"]) -> Float32[Array, "b t f"]:
    """Returns silu(gate) · up, where gate and up are the two halves of axis 2."""
    return jax.nn.silu(gate_up[:, :, 0]) * gate_up[:, :, 1]

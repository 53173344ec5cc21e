"""Root-mean-square normalisation (arXiv 1910.07467), in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jspec.kernels.library import floats, in_cpp


# XLA on CPU sums the squares of eight rows or more in another order than those of fewer, so a row's
# result would depend on how many rows stand beside it. The C++ has one order.
@in_cpp(
    "rms_norm",
    lambda inputs, scale, epsilon: floats(*inputs.shape),
    lambda inputs, scale, epsilon: scale.dtype in (jnp.bfloat16, jnp.float32),
)
def rms_norm(
    inputs: Float32[Array, "b t d"], scale: Float[Array, "d"], epsilon: Float32[Array, ""]
) -> Float32[Array, "b t d"]:
    """Returns inputs / sqrt(mean(inputs²) + epsilon) · scale, over the last axis."""
    mean_square = jnp.mean(jnp.square(inputs), axis=-1, keepdims=True)
    return inputs * jax.lax.rsqrt(mean_square + epsilon) * scale.astype(jnp.float32)

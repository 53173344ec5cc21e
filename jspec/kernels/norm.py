"""Root-mean-square normalisation (arXiv 1910.07467), in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jspec.kernels import library

_NATIVE_SCALES = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)  # that the C++ reads


def rms_norm(
    inputs: Float32[Array, "b t d"], scale: Float[Array, "d"], epsilon: float
) -> Float32[Array, "b t d"]:
    """Returns inputs / sqrt(mean(inputs²) + epsilon) · scale, over the last axis."""
    operands = inputs, scale, jnp.float32(epsilon)
    if scale.dtype not in _NATIVE_SCALES or not library.is_available():
        return rms_norm_by_xla(*operands)
    result = jax.ShapeDtypeStruct(inputs.shape, jnp.float32)
    return library.call("rms_norm", rms_norm_by_xla, result, *operands)


def rms_norm_by_xla(
    inputs: Float32[Array, "b t d"], scale: Float[Array, "d"], epsilon: Float32[Array, ""]
) -> Float32[Array, "b t d"]:
    """Does the same in JAX.

    XLA on CPU sums the squares of eight rows or more in another order than those of fewer, so a
    row's result depends on how many rows stand beside it. The C++ has one order.
    """
    mean_square = jnp.mean(jnp.square(inputs), axis=-1, keepdims=True)
    return inputs * jax.lax.rsqrt(mean_square + epsilon) * scale.astype(jnp.float32)

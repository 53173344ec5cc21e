"""What a layer computes between its products, in float32: norm, rotation of heads, gate."""

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
    """Returns inputs / sqrt(mean(inputs²) + epsilon) · scale, over the last axis (1910.07467)."""
    mean_square = jnp.mean(jnp.square(inputs), axis=-1, keepdims=True)
    return inputs * jax.lax.rsqrt(mean_square + epsilon) * scale.astype(jnp.float32)


@in_cpp(
    "rotate_heads",
    lambda qkv, cos, sin: (
        floats(*qkv.shape[:2], qkv.shape[2] * (qkv.shape[3] - 2), qkv.shape[4]),
        *2 * (floats(*qkv.shape[:3], qkv.shape[4]),),
    ),
)
def rotate_heads(
    qkv: Float32[Array, "b t k p h"],
    cos: Float32[Array, "b t half"],
    sin: Float32[Array, "b t half"],
) -> tuple[Float32[Array, "b t n h"], Float32[Array, "b t k h"], Float32[Array, "b t k h"]]:
    """Splits the heads of a layer, and rotates those of queries and keys.

    `qkv` has p heads for each key/value head: its query heads, its key head and its value head.
    Query heads are multiplied by h^-1/2 for attention, too. Value heads stay unchanged.
    """
    b, t, k, parts, h = qkv.shape
    rotated = apply_rope(qkv[:, :, :, :-1].reshape(b, t, -1, h), cos, sin)
    rotated = rotated.reshape(b, t, k, parts - 1, h)
    queries = rotated[:, :, :, :-1].reshape(b, t, -1, h) * h**-0.5
    return queries, rotated[:, :, :, -1], qkv[:, :, :, -1]


def apply_rope(
    heads: Float[Array, "b t n h"],
    cos: Float32[Array, "b t half"],
    sin: Float32[Array, "b t half"],
) -> Float32[Array, "b t n h"]:
    """Rotates dimension i together with dimension i + h/2 of every head, in float32.

    This is the pairing of Hugging Face's checkpoints. Meta's own pair neighbours, 2i and 2i + 1.
    """
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]  # the same for every head
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


# XLA on CPU uses one thread for it, however many rows there are.
@in_cpp("swiglu", lambda gate_up: floats(*gate_up.shape[:2], gate_up.shape[3]))
def swiglu(gate_up: Float32[Array, "b t 2 f"]) -> Float32[Array, "b t f"]:
    """Returns silu(gate) · up, the halves of axis 2 (SwiGLU, arXiv 2002.05202)."""
    return jax.nn.silu(gate_up[:, :, 0]) * gate_up[:, :, 1]


def geglu(gate_up: Float32[Array, "b t 2 f"]) -> Float32[Array, "b t f"]:
    """Returns gelu(gate) · up (GeGLU), with the tanh approximation of gelu (arXiv 1606.08415)."""
    return jax.nn.gelu(gate_up[:, :, 0], approximate=True) * gate_up[:, :, 1]

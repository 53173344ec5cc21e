"""Rotary position embeddings (arXiv 2104.09864) of the heads of one attention layer."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jspec.kernels.library import floats, in_cpp


def _results(qkv: Array, cos: Array, sin: Array) -> tuple[jax.ShapeDtypeStruct, ...]:
    del cos, sin
    b, t, k, parts, h = qkv.shape
    return floats(b, t, k * (parts - 2), h), floats(b, t, k, h), floats(b, t, k, h)


@in_cpp("rotate_heads", _results)
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

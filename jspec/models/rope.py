"""Rotary position embeddings (arXiv 2104.09864), with Llama 3's frequency scaling."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from jspec import kernels
from jspec.models.config import LlamaConfig, RopeScaling


def rope_frequencies(config: LlamaConfig) -> Float32[np.ndarray, "half"]:
    """Returns the angular frequency of each pair of dimensions, in radians a position."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = (1.0 / np.float32(config.rope_theta) ** exponents).astype(np.float32)
    if config.rope_scaling is None:
        return frequencies
    return _scale_llama3(frequencies, config.rope_scaling)


def _scale_llama3(
    frequencies: Float32[np.ndarray, "half"], scaling: RopeScaling
) -> Float32[np.ndarray, "half"]:
    """Divides low frequencies by the factor, keeps high ones, blends in between."""
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = (scaling.original_max_seq_len / wavelengths - low) / (high - low)
    blend = np.clip(blend, 0.0, 1.0)
    scaled = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    return scaled.astype(np.float32)


def rope_cos_sin(
    config: LlamaConfig, positions: Int[Array, "b t"]
) -> tuple[Float32[Array, "b t half"], Float32[Array, "b t half"]]:
    """Returns cosines and sines of every position's angles.

    The angles are float32 whatever the model's type: bfloat16 cannot tell position 257 from 256.
    """
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)


def rotate_heads(
    qkv: Float32[Array, "b t k p h"],
    cos: Float32[Array, "b t half"],
    sin: Float32[Array, "b t half"],
) -> tuple[Float32[Array, "b t n h"], Float32[Array, "b t k h"], Float32[Array, "b t k h"]]:
    """Returns query heads, rotated and scaled for attention, rotated key heads, and value heads.

    Args:
      qkv: p heads for each key/value head: its query heads, its key head and its value head.
      cos: of every position's angles.
      sin: of every position's angles.
    """
    if not kernels.is_available():
        return _rotate_heads(qkv, cos, sin)
    b, t, k, parts, h = qkv.shape
    shapes = (b, t, k * (parts - 2), h), (b, t, k, h), (b, t, k, h)
    results = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    queries, keys, values = kernels.call("rotate_heads", _rotate_heads, results, qkv, cos, sin)
    return queries, keys, values


def _rotate_heads(
    qkv: Float32[Array, "b t k p h"],
    cos: Float32[Array, "b t half"],
    sin: Float32[Array, "b t half"],
) -> tuple[Float32[Array, "b t n h"], Float32[Array, "b t k h"], Float32[Array, "b t k h"]]:
    """Rotates by XLA."""
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
    """Rotates dimension i with dimension i + h/2 of every head, in float32."""
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

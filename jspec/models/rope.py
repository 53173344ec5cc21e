"""The angles of rotary position embeddings (arXiv 2104.09864), with Llama 3's scaling."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

from jspec.models.config import DecoderConfig


def rope_frequencies(config: DecoderConfig) -> Float32[np.ndarray, "half"]:
    """Returns the angular frequency of each pair of dimensions, in radians a position."""
    # In NumPy, once when the program is traced: the frequencies are constants of the model.
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = (1.0 / np.float32(config.rope_theta) ** exponents).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    # Llama 3 (arXiv 2407.21783) divides low frequencies by the factor, keeps high ones, blends in
    # between. Wavelengths, in tokens, are compared with the context before its extension: a short
    # one has made many turns in it and is well trained, a long one has not.
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = (scaling.original_max_seq_len / wavelengths - low) / (high - low)
    blend = np.clip(blend, 0.0, 1.0)
    scaled = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    return scaled.astype(np.float32)


def rope_cos_sin(
    config: DecoderConfig, positions: Int[Array, "b t"]
) -> tuple[Float32[Array, "b t half"], Float32[Array, "b t half"]]:
    """Returns cosines and sines of every position's angles."""
    # float32 whatever the model's type: bfloat16 cannot tell position 257 from 256.
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)

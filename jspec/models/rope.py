"""The angles of rotary position embeddings (arXiv 2104.09864), scaled for longer contexts."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

from jspec.models.config import DecoderConfig, RopeScaling


def rope_frequencies(config: DecoderConfig, kind: str = "global") -> Float32[np.ndarray, "half"]:
    """Returns the angular frequency of each pair of dimensions, in radians a position.

    `kind` is what `config.rope_of` says of a layer, and not "none".
    """
    # In NumPy, once when the program is traced: the frequencies are constants of the model.
    theta = config.local_rope_theta if kind == "local" else config.rope_theta
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = (1.0 / np.float32(theta) ** exponents).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None or kind == "local" or scaling.kind == "dynamic":
        return frequencies
    if scaling.kind == "linear":
        scaled = frequencies / scaling.factor
    elif scaling.kind == "longrope":
        scaled = frequencies / np.array(scaling.short_factors, np.float32)
    else:
        # High frequencies are kept, low ones divided by the factor, those in between blended.
        is_yarn = scaling.kind == "yarn"
        blend = _yarn_blend(config, scaling) if is_yarn else _llama3_blend(frequencies, scaling)
        scaled = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    return scaled.astype(np.float32)


def _llama3_blend(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Returns how much of each frequency is kept (arXiv 2407.21783)."""
    # Wavelengths, in tokens, are compared with the context before its extension: a short one has
    # made many turns in it and is well trained, a long one has not.
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = (scaling.original_max_seq_len / wavelengths - low) / (high - low)
    return np.clip(blend, 0.0, 1.0)


def _yarn_blend(config: DecoderConfig, scaling: RopeScaling) -> np.ndarray:
    """Returns how much of each frequency is kept (arXiv 2309.00071): a ramp over dimensions."""

    def dimension(turns: float) -> float:
        """Returns the pair of dimensions that turns this often in the original context."""
        wavelength = scaling.original_max_seq_len / (turns * 2 * math.pi)
        return config.head_dim * math.log(wavelength) / (2 * math.log(config.rope_theta))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), config.head_dim - 1)
    ramp = (np.arange(config.head_dim // 2, dtype=np.float32) - low) / max(high - low, 1e-3)
    return 1 - np.clip(ramp, 0.0, 1.0)


def rope_cos_sin(
    config: DecoderConfig, positions: Int[Array, "b t"], kind: str = "global"
) -> tuple[Float32[Array, "b t half"], Float32[Array, "b t half"]]:
    """Returns cosines and sines of every position's angles; see `DecoderConfig.rope_of`."""
    if kind == "none":
        # An angle of 0 leaves a head as it is, so the layer needs no other code.
        still = jnp.ones((*positions.shape, config.head_dim // 2), jnp.float32)
        return still, jnp.zeros_like(still)
    # float32 whatever the model's type: bfloat16 cannot tell position 257 from 256.
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(config, kind)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    scaling = config.rope_scaling
    if kind == "local" or scaling is None or scaling.attention_factor == 1.0:
        return cos, sin
    return cos * scaling.attention_factor, sin * scaling.attention_factor

"""Float kernels rounded to blocks of a GGUF format: Q4_0, and Q8_0 for the embedding.

A block holds 32 inputs of one output. A weight is d · code, where d is a float16 number of the
block, and the codes are -8 to 7 (stored plus 8) or -127 to 127. The result is a `PackedKernel`, so
that its products are those of packed files; they round their inputs to bytes, too.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt8

from jspec.kernels import PackedKernel
from jspec.kernels.packed import pack

BLOCK = 32  # inputs
# Tried for each block of Q4_0, as multiples of the scale that clips nothing. More of them gain 1 %
# of the error, and take twice as long; these gain 18 % on a real model.
_LEAST, _STEP, _NUM_SCALES = 0.75, 0.05, 7


def quantize_blocks(kernel: jax.Array, kind: str, dtype: Any) -> PackedKernel:
    """Returns a float kernel [*out i] in "q4_0" or "q8_0", already computed.

    i is a multiple of 32; `dtype` is the model's.
    """
    weights = kernel.reshape(-1, kernel.shape[-1])
    blocks = np.asarray(_to_blocks(weights, kind))
    strips = jax.device_put(pack([blocks], kind, np.arange(len(blocks))))
    return PackedKernel(strips, kind, kernel.shape, jnp.dtype(dtype), takes_bytes=True)


@functools.partial(jax.jit, static_argnums=1)
def _to_blocks(weights: Array, kind: str) -> UInt8[Array, "o bytes"]:
    groups = weights.astype(jnp.float32).reshape(len(weights), -1, BLOCK)
    scales = (_q4_scales if kind == "q4_0" else _q8_scales)(groups).astype(jnp.float16)
    # The codes are those of the scale as it is stored.
    codes = _codes(groups, scales.astype(jnp.float32), kind).astype(jnp.int8)
    stored = jax.lax.bitcast_convert_type(codes, jnp.uint8)
    if kind == "q4_0":
        low, high = jnp.split(stored + jnp.uint8(8), 2, axis=-1)
        stored = low | (high << jnp.uint8(4))
    blocks = jnp.concatenate([jax.lax.bitcast_convert_type(scales, jnp.uint8), stored], axis=-1)
    return blocks.reshape(len(weights), -1)


def _codes(
    groups: Float32[Array, "o g 32"], scales: Float32[Array, "o g"], kind: str
) -> Float32[Array, "o g 32"]:
    least, most = (-8, 7) if kind == "q4_0" else (-127, 127)
    nearest = jnp.round(groups / jnp.where(scales == 0, 1.0, scales)[..., None])
    return jnp.clip(nearest, least, most)


def _q8_scales(groups: Float32[Array, "o g 32"]) -> Float32[Array, "o g"]:
    return jnp.max(jnp.abs(groups), axis=-1) / 127


def _q4_scales(groups: Float32[Array, "o g 32"]) -> Float32[Array, "o g"]:
    """Returns the scale of least squared error among a few, each fitted to its codes."""
    # -8 reaches further than 7: the weight of largest size becomes -8 · d, whatever its sign.
    most, least = jnp.max(groups, axis=-1), jnp.min(groups, axis=-1)
    usual = jnp.where(most > -least, most, least) / -8

    def try_one(index: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
        codes = _codes(groups, usual * (_LEAST + _STEP * index), "q4_0")
        # With the codes given, d = w·c / c·c has the least error, |w|² - (w·c)² / c·c.
        along, square = jnp.sum(groups * codes, axis=-1), jnp.sum(codes**2, axis=-1)
        gain = along**2 / jnp.maximum(square, 1)
        is_better = gain > best[0]
        scales = jnp.where(is_better, along / jnp.maximum(square, 1), best[1])
        return jnp.where(is_better, gain, best[0]), scales

    nothing = jnp.zeros_like(usual)
    return jax.lax.fori_loop(0, _NUM_SCALES, try_one, (nothing, nothing))[1]

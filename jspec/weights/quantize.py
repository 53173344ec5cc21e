"""Weights rounded to 8 or 4 bits, one kernel at a time; norms and biases stay floats.

The rounding is symmetric and to the nearest. "int8": the largest weight of an output becomes 127.
"int4": integers up to 7 in groups of 32 inputs; each group has a multiplier, up to 18, of its
output's scale, and 7 · 18 = 126. Embedding and head are int8 even then, because 4 bits of theirs
harm the logits most. See `kernels.quantized` for how the integers are stored and multiplied.

"q4_0": the blocks of that GGUF format, with Q8_0 for the embedding. Products round their inputs to
8 bits, too, as a draft model then reads a prompt faster.

A block of q4_0 holds 32 inputs of one output. A weight is d · code, where d is a float16 number of
the block, and the codes are -8 to 7 (stored plus 8) or -127 to 127. The result is a `PackedKernel`,
so that its products are those of packed files; they round their inputs to bytes, too.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float32, UInt8

from jspec.common.errors import InputError
from jspec.common.typing import Params
from jspec.kernels import CompactKernel, PackedKernel
from jspec.kernels.packed import FORMATS, STRIP, pack
from jspec.kernels.quantized import GROUP, QuantizedKernel, quantized_rows
from jspec.models.config import DecoderConfig
from jspec.weights.parameter import Parameter, Path
from jspec.weights.tensor_names import parameter_table

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
    largest = jnp.max(jnp.abs(groups), axis=-1)
    scales = (_q4_scales(groups) if kind == "q4_0" else largest / 127).astype(jnp.float16)
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


INTEGERS = ("int8", "int4")
Q4_0 = "q4_0"
KINDS = (*INTEGERS, Q4_0)
PACKED = "packed"  # as a GGUF file holds them, not rounded again; see `packed_weights`
PACKED_A8 = "packed_a8"  # packed, and the inputs of products rounded to bytes
PACKED_KINDS = (PACKED, PACKED_A8)
QUANTIZATIONS = ("none", *KINDS, *PACKED_KINDS)
QUANTIZATION_FLAG = ("auto", *QUANTIZATIONS)  # auto: see `load_model`
_TABLES = ("embedding", "head")
# The last axis is their inputs.
_KERNELS = (*_TABLES, "qkv", "out", "gate_up", "down", "fc", "query", "key_value", "up")
_LARGEST_MULTIPLIER = 18


def is_kernel(path: Path) -> bool:
    """Returns whether a parameter of that path is a kernel, not a norm or a bias."""
    return path[-1] in _KERNELS


def is_quantizable(parameter: Parameter) -> bool:
    """Returns whether a parameter is a kernel."""
    return is_kernel(parameter.path)


def _is_packed(parameter: Parameter, kind: str | None) -> bool:
    return kind == "int4" and is_quantizable(parameter) and parameter.path[-1] not in _TABLES


def block_format(path: Path) -> str:
    """Returns the GGUF format that a kernel has under "q4_0"."""
    return "q8_0" if path[-1] == "embedding" else Q4_0


def num_bytes(parameter: Parameter, kind: str | None, float_bytes: int) -> int:
    """Returns how many bytes a parameter takes, if a float takes `float_bytes`."""
    size = math.prod(parameter.shape)
    if kind is None or not is_quantizable(parameter):
        return size * float_bytes
    if kind == Q4_0:
        form, outputs = FORMATS[block_format(parameter.path)], size // parameter.shape[-1]
        # The last strip of outputs is padded.
        return -(-outputs // STRIP) * STRIP * parameter.shape[-1] // BLOCK * form.num_bytes
    scales = 4 * size // parameter.shape[-1]  # float32, one an output
    return scales + (size // 2 + size // GROUP if _is_packed(parameter, kind) else size)


def holds_compact(params: Params) -> bool:
    """Returns whether any kernel is stored in fewer bits than floats."""
    return any(isinstance(leaf, CompactKernel) for leaf in flatten_dict(params).values())


def check_kind(config: DecoderConfig, kind: str | None) -> None:
    """Checks that a model can be quantised in this way; None means no quantisation.

    Raises:
      InputError: an unknown kind, a model with experts, or kernel inputs that do not divide into
        the groups of int4 or the blocks of q4_0.
    """
    if kind in (*KINDS, *PACKED_KINDS) and config.num_experts:
        raise InputError(f"quantization {kind!r} expects a model without experts; use 'none'")
    if kind in PACKED_KINDS:
        raise InputError(f"quantization {kind!r} expects a .gguf file, whose weights are packed")
    if kind is not None and kind not in KINDS:
        known = ", ".join(("auto", "none", *KINDS, *PACKED_KINDS))
        raise InputError(f"expected a quantization among {known}; got {kind!r}")
    for parameter in parameter_table(config):
        is_grouped = (kind == Q4_0 and is_quantizable(parameter)) or _is_packed(parameter, kind)
        if is_grouped and parameter.shape[-1] % GROUP:
            raise InputError(
                f"{'/'.join(parameter.path)}: {kind} expects inputs in groups of {GROUP}, "
                f"got {parameter.shape[-1]}; int8 takes any number"
            )


def quantize(
    kernel: jax.Array, path: Path, kind: str, dtype: Any
) -> QuantizedKernel | PackedKernel:
    """Returns a float kernel in integers, already computed, so that the floats can be freed.

    The last key of the parameter's `path` tells which kernel it is; `dtype` is the model's.
    """
    if kind == Q4_0:
        return quantize_blocks(kernel, block_format(path), dtype)
    kind = "int8" if path[-1] in _TABLES else kind
    return jax.block_until_ready(_quantize(kernel, kind, jnp.dtype(dtype)))


@jax.jit
def dequantize(kernel: QuantizedKernel) -> jax.Array:
    """Returns the float32 array [*out i] that a kernel represents."""
    ids = jnp.arange(kernel.scales.shape[0], dtype=jnp.int32)
    return quantized_rows(kernel, ids[None])[0].reshape(kernel.shape)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _quantize(kernel: jax.Array, kind: str, dtype: Any) -> QuantizedKernel:
    weights = kernel.astype(jnp.float32).reshape(-1, kernel.shape[-1])
    multipliers = None
    if kind == "int8":
        scales = _scales(weights, 127)
        values = jnp.clip(jnp.round(weights / scales[:, None]), -127, 127).astype(jnp.int8)
    else:
        values, scales, multipliers = _to_int4(weights)
    return QuantizedKernel(values, scales, multipliers, kernel.shape, dtype)


def _scales(weights: jax.Array, limit: int) -> jax.Array:
    """Returns the scales [o] that map each output's largest weight to `limit`; 1 for zeros."""
    largest = jnp.max(jnp.abs(weights), axis=1)
    return jnp.where(largest == 0, 1.0, largest / limit)


def _to_int4(weights: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns packed values [o i/2], scales [o] and multipliers [o i/32] for weights [o i]."""
    scales = _scales(weights, 7 * _LARGEST_MULTIPLIER)
    groups = (weights / scales[:, None]).reshape(len(weights), -1, GROUP)
    multipliers = jnp.ceil(jnp.max(jnp.abs(groups), axis=2) / 7)
    multipliers = jnp.clip(multipliers, 1, _LARGEST_MULTIPLIER)
    integers = jnp.clip(jnp.round(groups / multipliers[:, :, None]), -7, 7).astype(jnp.int8)
    low, high = jnp.split(integers, 2, axis=2)
    packed = (low & jnp.int8(15)) | (high << jnp.int8(4))
    values = jax.lax.bitcast_convert_type(packed, jnp.uint8).reshape(len(weights), -1)
    return values, scales, multipliers.astype(jnp.int8)

"""Decoders of today's families as pure functions over a KV cache that is a value."""

from jspec.kernels import CompactKernel, QuantizedKernel
from jspec.models.cache import KVCache, causal_mask
from jspec.models.config import PRESETS, DecoderConfig, EncoderConfig, RopeScaling
from jspec.models.decoder import Decoder, init_cache, init_params, make_apply

__all__ = [
    "PRESETS",
    "CompactKernel",
    "Decoder",
    "DecoderConfig",
    "EncoderConfig",
    "KVCache",
    "QuantizedKernel",
    "RopeScaling",
    "causal_mask",
    "init_cache",
    "init_params",
    "make_apply",
]

"""Llama-family models as pure functions over a KV cache that is a value."""

from jspec.kernels import CompactKernel, QuantizedKernel
from jspec.models.cache import KVCache, causal_mask
from jspec.models.config import PRESETS, DecoderConfig, RopeScaling, get_preset
from jspec.models.decoder import Decoder, init_cache, init_params, make_apply
from jspec.models.hf_config import from_hf_config, to_hf_config

__all__ = [
    "PRESETS",
    "CompactKernel",
    "Decoder",
    "DecoderConfig",
    "KVCache",
    "QuantizedKernel",
    "RopeScaling",
    "causal_mask",
    "from_hf_config",
    "get_preset",
    "init_cache",
    "init_params",
    "make_apply",
    "to_hf_config",
]

"""Qwen2 and 2.5 (arXiv 2407.10671, 2412.15115): biases of queries, keys and values.

Qwen3 (arXiv 2505.09388) has none, and norms every query and key head.
"""

from typing import Any

from jspec.models.config import DecoderConfig
from jspec.models.families.family import (
    ATTENTION_BIAS,
    Family,
    GgufForm,
    read_layer_types,
    window_fields,
    write_layer_types,
)


def _read(raw: dict[str, Any]) -> dict[str, Any]:
    window, first = raw.pop("sliding_window", 4096), raw.pop("max_window_layers", 28)
    if not raw.pop("use_sliding_window", False):
        window = None
    layers = read_layer_types(raw, lambda layer: layer >= first)
    return window_fields(window, layers)


def _write(config: DecoderConfig) -> dict[str, Any]:
    return write_layer_types(config) | {"use_sliding_window": config.window is not None}


_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32_768}
QWEN2 = Family(
    "Qwen2ForCausalLM",
    "qwen2",
    fixed={"qkv_bias": True},
    defaults=_DEFAULTS,
    read=_read,
    write=_write,
    gguf=GgufForm("qwen2"),
)
QWEN3 = Family(
    "Qwen3ForCausalLM",
    "qwen3",
    keys=ATTENTION_BIAS,
    fixed={"qk_norm": "head"},
    defaults=_DEFAULTS | {"head_dim": 128},
    gguf=GgufForm("qwen3"),
    read=_read,
    write=_write,
)

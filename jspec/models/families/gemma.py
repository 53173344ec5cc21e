"""Gemma 2 (arXiv 2408.00118) and 3 (2503.19786).

Norms stand before and after each half of a layer, their weights stored less 1. Embeddings are
scaled, the gate is GELU, and layers with a window alternate with full ones. Gemma 2 caps scores and
logits. Gemma 3 norms queries and keys, and its windowed layers have their own rotary angles.
"""

from collections.abc import Mapping
from typing import Any

from jspec.models.config import DecoderConfig
from jspec.models.families.family import (
    ATTENTION_BIAS,
    WINDOW_KEYS,
    Family,
    GgufForm,
    as_number,
    as_settings,
    complete_window,
    read_layer_types,
    window_fields,
    write_layer_types,
    write_rope,
)

_KEYS = ATTENTION_BIAS | {
    "attn_logit_softcapping": "attention_softcap",
    "final_logit_softcapping": "logits_softcap",
}
_DEFAULTS = {"head_dim": 256, "num_key_value_heads": 4, "tie_word_embeddings": True}
_FIXED = {"norms": "both", "activation": "gelu_tanh"}
_GELU = "gelu_pytorch_tanh"
_REQUIRED = {
    "hidden_activation": (_GELU, None),
    "hidden_act": (_GELU,),
    "use_bidirectional_attention": (None, False),
}


def _read(raw: dict[str, Any], pattern: int) -> dict[str, Any]:
    """Returns the fields of both; every `pattern`-th layer is full where nothing else is said."""
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        pattern = raw.pop(key, pattern)
    layers = read_layer_types(raw, lambda layer: (layer + 1) % pattern != 0)
    scalar = raw.pop("query_pre_attn_scalar", 256)
    scales = {"embedding_scale": raw["hidden_size"] ** 0.5, "attention_scale": scalar**-0.5}
    return scales | window_fields(raw.pop("sliding_window", 4096), layers)


def _read3(raw: dict[str, Any]) -> dict[str, Any]:
    rope, theta = raw.get("rope_parameters"), raw.pop("rope_local_base_freq", 10_000.0)
    if isinstance(rope, dict) and "full_attention" in rope:
        raw["rope_parameters"] = rope["full_attention"]
        local = as_settings("sliding_attention", rope.get("sliding_attention"))
        theta = local.pop("rope_theta", theta)
        if local.pop("rope_type", "default") != "default" or local:
            raise ValueError("expected the default rope type in layers with a window")
    return _read(raw, 6) | {"local_rope_theta": as_number("rope_theta", theta, above=0.0)}


def _write(config: DecoderConfig) -> dict[str, Any]:
    scalar = round((config.attention_scale or config.head_dim**-0.5) ** -2, 6)
    # transformers takes whole numbers only.
    scalar = int(scalar) if scalar == int(scalar) else scalar
    return write_layer_types(config) | {"query_pre_attn_scalar": scalar}


def _write3(config: DecoderConfig) -> dict[str, Any]:
    local = config.local_rope_theta or config.rope_theta
    rope = {
        "full_attention": write_rope(config.rope_theta, config.rope_scaling),
        "sliding_attention": write_rope(local, None),
    }
    return _write(config) | {"rope_parameters": rope}


def _complete(raw: Mapping[str, Any]) -> dict[str, Any]:
    # llama.cpp knows the 27B models, whose scores have another scale, by their number of layers.
    is_27b = raw["num_hidden_layers"] in (46, 62)
    per_head = raw["hidden_size"] // raw["num_attention_heads"]
    scalar = {"query_pre_attn_scalar": per_head if is_27b else raw["head_dim"]}
    return scalar | complete_window(raw)


def _complete3(raw: Mapping[str, Any]) -> dict[str, Any]:
    # Without the key no layer has a window.
    return {"sliding_window": raw.get("sliding_window") or None} | _complete(raw)


_GGUF_KEYS = WINDOW_KEYS | {"final_logit_softcapping": "final_logit_softcapping"}
GEMMA2 = Family(
    "Gemma2ForCausalLM",
    "gemma2",
    keys=_KEYS,
    defaults=_DEFAULTS
    | {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 8192,
    },
    fixed=_FIXED,
    required=_REQUIRED,
    read=lambda raw: _read(raw, 2),
    write=_write,
    norm_offset=1.0,
    gguf=GgufForm(
        "gemma2",
        keys=_GGUF_KEYS | {"attn_logit_softcapping": "attn_logit_softcapping"},
        complete=_complete,
    ),
)
GEMMA3 = Family(
    "Gemma3ForCausalLM",
    "gemma3_text",
    keys=_KEYS,
    defaults=_DEFAULTS | {"rope_theta": 1_000_000.0, "max_position_embeddings": 131_072},
    fixed=_FIXED | {"qk_norm": "head"},
    required=_REQUIRED,
    read=_read3,
    write=_write3,
    norm_offset=1.0,
    gguf=GgufForm(
        "gemma3",
        keys=_GGUF_KEYS | {"rope.freq_base_swa": "rope_local_base_freq"},
        complete=_complete3,
    ),
)

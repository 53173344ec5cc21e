"""Phi-3 (arXiv 2404.14219): a Llama with fused tensors, perhaps a window, perhaps LongRoPE."""

from collections.abc import Mapping
from typing import Any

from jspec.models.families.family import Family, GgufForm, read_window, write_window


def _read(raw: dict[str, Any]) -> dict[str, Any]:
    original = raw.pop("original_max_position_embeddings", 4096)
    for key in ("rope_parameters", "rope_scaling"):
        rope = raw.get(key)
        if isinstance(rope, dict) and "short_factor" in rope and original is not None:
            raw[key] = {"original_max_position_embeddings": original} | rope
    return read_window(raw)


def _complete(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "sliding_window": raw.get("sliding_window") or None,  # 0 means that there is none
        "original_max_position_embeddings": raw["max_position_embeddings"],  # without the key
    }


PHI3 = Family(
    "Phi3ForCausalLM",
    "phi3",
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    required={"partial_rotary_factor": (1.0,)},
    ignored=frozenset({"auto_map", "embd_pdrop", "resid_pdrop"}),
    read=_read,
    write=write_window,
    is_fused=True,
    gguf=GgufForm("phi3", keys={"attention.sliding_window": "sliding_window"}, complete=_complete),
)

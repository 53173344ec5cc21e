"""Granite 3 (arXiv 2408.13359, on the multipliers): a Llama with four of them."""

from typing import Any

from jspec.models.config import DecoderConfig
from jspec.models.families.family import BIASES, Family, GgufForm


def _read(raw: dict[str, Any]) -> dict[str, Any]:
    return {"logits_scale": 1 / raw.pop("logits_scaling", 1.0)}


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {"logits_scaling": round(1 / config.logits_scale, 9)}


GRANITE = Family(
    "GraniteForCausalLM",
    "granite",
    keys=BIASES
    | {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention_scale",
    },
    defaults={
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
    gguf=GgufForm(
        "granite",
        keys={
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "attention.scale": "attention_multiplier",
            "logit_scale": "logits_scaling",
        },
        is_permuted=True,
    ),
    read=_read,
    write=_write,
)

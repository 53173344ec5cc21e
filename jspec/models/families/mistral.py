"""Mistral (arXiv 2310.06825): Llama with a sliding window in every layer, or none."""

from typing import Any

from jspec.models.families.family import Family, read_window, write_window


def _read(raw: dict[str, Any]) -> dict[str, Any]:
    raw.setdefault("sliding_window", 4096)  # null says that there is none
    return read_window(raw)


MISTRAL = Family(
    "MistralForCausalLM",
    "mistral",
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131_072},
    read=_read,
    write=write_window,
)

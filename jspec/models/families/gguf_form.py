"""How llama.cpp writes a family into a GGUF file, as its converter and its loader have it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

SLIDING, FULL = "sliding_attention", "full_attention"  # Hugging Face's `layer_types`


def _nothing(_: Any) -> dict[str, Any]:
    return {}


@dataclasses.dataclass(frozen=True)
class GgufForm:
    """What is particular in the files of one architecture.

    Attributes:
      architecture: its name there.
      keys: keys under that name, besides those of all architectures, and the keys of config.json
        that they become.
      ignored: keys that change nothing that jspec computes.
      is_permuted: whether the rows of each query and key head alternate between its two halves:
        llama.cpp rotates neighbours (2i, 2i + 1) in these architectures, not (i, i + H/2).
      has_experts: whether its layers have experts. A Mixtral calls itself "llama", too.
      complete: takes the keys of config.json found so far; returns those that llama.cpp hard-codes
        or spells otherwise.
    """

    architecture: str
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    is_permuted: bool = False
    has_experts: bool = False
    complete: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing


WINDOW_KEYS = {
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
}


def complete_window(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `layer_types` where a file says of each layer whether it has the window."""
    pattern = raw.get("sliding_window_pattern")
    if not isinstance(pattern, list):
        return {}
    kinds = [SLIDING if is_windowed else FULL for is_windowed in pattern]
    return {"layer_types": kinds, "sliding_window_pattern": 1}

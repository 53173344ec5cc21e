"""A family of models: how its config.json and its GGUF files become a `DecoderConfig`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jspec.models.config import DecoderConfig

SLIDING, FULL = "sliding_attention", "full_attention"  # Hugging Face's `layer_types`


def _no_change(_: Any) -> dict[str, Any]:
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
    complete: Callable[[Mapping[str, Any]], dict[str, Any]] = _no_change


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


ATTENTION_BIAS = {"attention_bias": "out_bias"}
BIASES = ATTENTION_BIAS | {"mlp_bias": "mlp_bias"}


def _nothing(_: Any) -> dict[str, Any]:
    return {}


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture of Hugging Face's.

    Attributes:
      architecture: its name in config.json.
      model_type: the other name there.
      keys: keys of config.json besides those of all families, and the fields that they become.
      defaults: what a missing key means, where that is not what it means for a Llama.
      fixed: fields that are the same in all its models.
      required: keys that would change the computation, and the only values that jspec honours;
        the first is what a missing key means.
      ignored: keys that change nothing that jspec computes.
      read: takes further keys out of a config.json, and returns fields.
      write: returns what `read` took.
      is_fused: whether queries, keys and values are one tensor, and gate and up another.
      norm_offset: is added to the weight of every norm.
      sparse_names: what the tensors of a layer of experts are called: the layer, then gate, up and
        down of an expert. None where no layer has experts.
      gguf: how llama.cpp writes it; None where its converter makes a file of another family of it.
    """

    architecture: str
    model_type: str
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    required: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    read: Callable[[dict[str, Any]], dict[str, Any]] = _nothing
    write: Callable[[DecoderConfig], dict[str, Any]] = _nothing
    is_fused: bool = False
    norm_offset: float = 0.0
    sparse_names: tuple[str, str, str, str] | None = None
    gguf: GgufForm | None = None


def read_window(raw: dict[str, Any]) -> dict[str, Any]:
    """Takes the window of all layers out of a config.json; returns its fields."""
    return window_fields(raw.pop("sliding_window", None), range(raw["num_hidden_layers"]))


def write_window(config: DecoderConfig) -> dict[str, Any]:
    """Returns what `read_window` reads."""
    return {"sliding_window": config.window}


def window_fields(window: int | None, layers: Any) -> dict[str, Any]:
    """Returns the fields of a window in those layers; none where no layer has one."""
    layers = tuple(layers)
    return {} if window is None or not layers else {"window": window, "windowed_layers": layers}


def read_layer_types(raw: dict[str, Any], is_windowed: Callable[[int], bool]) -> list[int]:
    """Takes `layer_types` out of a config.json; returns which layers have the window.

    `is_windowed` says it of a layer where the key is missing.

    Raises:
      ValueError: not one type a layer, or an unknown type.
    """
    num_layers, kinds = raw["num_hidden_layers"], raw.pop("layer_types", None)
    if kinds is None:
        return [layer for layer in range(num_layers) if is_windowed(layer)]
    if len(kinds) != num_layers or any(kind not in (SLIDING, FULL) for kind in kinds):
        raise ValueError(f"expected {num_layers} layer_types of {SLIDING} or {FULL}, got {kinds}")
    return [layer for layer, kind in enumerate(kinds) if kind == SLIDING]


def write_layer_types(config: DecoderConfig) -> dict[str, Any]:
    """Returns the window and what `read_layer_types` reads."""
    windowed = [config.window_of(layer) is not None for layer in range(config.num_layers)]
    return {
        "sliding_window": config.window,
        "layer_types": [SLIDING if is_windowed else FULL for is_windowed in windowed],
    }

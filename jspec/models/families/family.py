"""A family of models: how its config.json and its GGUF files become a `DecoderConfig`.

Also what families share: windows, and the settings of rotary embeddings in all their spellings.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jspec.models.config import MAX_FLOAT, MAX_SIZE, ROPE_KINDS, DecoderConfig, RopeScaling

_MAX_LAYERS = 10_000
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
      is_permuted: whether the rows of each query and key head alternate between its two halves:
        llama.cpp rotates neighbours (2i, 2i + 1) in these architectures, not (i, i + H/2).
      has_experts: whether its layers have experts. A Mixtral calls itself "llama", too.
      complete: takes the keys of config.json found so far; returns those that llama.cpp hard-codes
        or spells otherwise.
    """

    architecture: str
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
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


ATTENTION_BIAS = {"attention_bias": "out_bias"}
BIASES = ATTENTION_BIAS | {"mlp_bias": "mlp_bias"}


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
      read_all: takes all keys that count out of the config.json of an encoder-decoder, which shares
        none with the other families, and returns its config. None of a decoder alone.
      write_all: returns what `read_all` took.
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
    read_all: Callable[[dict[str, Any]], DecoderConfig] | None = None
    write_all: Callable[[DecoderConfig], dict[str, Any]] = _nothing
    is_fused: bool = False
    norm_offset: float = 0.0
    sparse_names: tuple[str, str, str, str] | None = None
    gguf: GgufForm | None = None


def check_sizes(raw: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Checks that the keys are there, and whole numbers of at least 1; raises ValueError."""
    for key in keys:
        if raw.get(key) is None:
            raise ValueError(f"config lacks the key {key!r}")
        # Families list every layer, so a damaged number would take hours, or all memory.
        most = _MAX_LAYERS if key == "num_hidden_layers" else MAX_SIZE
        if type(raw[key]) is not int or not 1 <= raw[key] <= most:
            whole = f"a whole number from 1 to {most}"
            raise ValueError(f"expected {key} to be {whole}, got {raw[key]!r}")


def take_keys(raw: dict[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """Takes sizes out of a config.json, see `check_sizes`; returns them as the fields of `keys`."""
    check_sizes(raw, keys)
    return {field: raw.pop(key) for key, field in keys.items()}


def take_ends(raw: dict[str, Any], default: int) -> tuple[Any, ...]:
    """Takes the ids that end a text, a number or a list, out of a config.json."""
    ends = raw.pop("eos_token_id", default)
    return tuple(ends) if isinstance(ends, list) else (ends,)


def read_window(raw: dict[str, Any], default: int | None = None) -> dict[str, Any]:
    """Takes the window of all layers out of a config.json; returns its fields."""
    return window_fields(raw.pop("sliding_window", default), range(raw["num_hidden_layers"]))


def write_window(config: DecoderConfig) -> dict[str, Any]:
    """Returns what `read_window` reads."""
    return {"sliding_window": config.window}


def window_fields(window: int | None, layers: Any) -> dict[str, Any]:
    """Returns the fields of a window in those layers; no fields if no layer has a window."""
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


_ORIGINAL = "original_max_position_embeddings"
# Keys of each kind, and the fields of `RopeScaling` that they become.
_KEYS: Mapping[str, Mapping[str, str]] = {
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        _ORIGINAL: "original_max_seq_len",
    },
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        _ORIGINAL: "original_max_seq_len",
        "attention_factor": "attention_factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
    },
    "longrope": {
        "factor": "factor",
        _ORIGINAL: "original_max_seq_len",
        "attention_factor": "attention_factor",
        "short_factor": "short_factors",
        "long_factor": "long_factors",
    },
}
_OLD_KINDS = {"su": "longrope"}  # of early Phi-3


def read_rope(raw: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Takes the RoPE settings out of `raw`, in either spelling, and checks them.

    Raises:
      ValueError: a kind, a key or a value that jspec cannot honour.
    """
    parameters = raw.pop("rope_parameters", None)
    scaling = raw.pop("rope_scaling", None)
    if parameters is not None and scaling is not None and parameters != scaling:
        raise ValueError("config has both rope_parameters and rope_scaling, and they differ")
    rope = as_settings("rope scaling", parameters or scaling)
    # Inside the RoPE settings in the newer spelling, beside them in the older.
    theta = raw.pop("rope_theta", None)
    theta = rope.pop("rope_theta", 10_000.0 if theta is None else theta)
    return as_number("rope_theta", theta, above=0.0), _read_scaling(
        rope, raw.get("max_position_embeddings")
    )


def _read_scaling(rope: dict[str, Any], max_seq_len: int | None) -> RopeScaling | None:
    kind = rope.pop("rope_type", rope.get("type", "default"))
    rope.pop("type", None)
    kind = _OLD_KINDS.get(kind, kind)
    if kind not in ("default", *ROPE_KINDS):
        known = ", ".join(repr(name) for name in ("default", *ROPE_KINDS))
        raise ValueError(f"expected a rope type among {known}; got {kind!r}")
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("expected partial_rotary_factor 1.0: every head dimension is rotated")
    if kind == "yarn" and not rope.pop("truncate", True):
        raise ValueError("expected truncate of yarn rope scaling to be true, got false")
    fields: dict[str, Any] = {}
    if kind != "default":
        given = {key: rope[key] for key in _KEYS[kind] if rope.get(key) is not None}
        rope |= {key: _numbers(key, value) for key, value in given.items()}
        rope = _with_defaults(kind, rope, max_seq_len)
        keys = _KEYS[kind]
        if missing := [key for key in keys if rope.get(key) is None]:
            raise ValueError(f"{kind} rope scaling lacks the key {missing[0]!r}")
        fields = {field: rope.pop(key) for key, field in keys.items()}
        if "original_max_seq_len" in fields:
            fields["original_max_seq_len"] = int(fields["original_max_seq_len"])
    if rope:
        raise ValueError(f"unknown rope keys: {', '.join(sorted(rope))}")
    return RopeScaling(**fields, kind=kind) if fields else None


def as_settings(name: str, value: Any) -> dict[str, Any]:
    """Returns a copy of an object of settings, empty for null; raises ValueError for another."""
    if not isinstance(value or {}, dict):
        raise ValueError(f"expected {name} to be an object, got {value!r}")
    return dict(value or {})


def as_number(name: str, value: Any, above: float) -> float:
    """Returns a finite number above that; raises ValueError for anything else."""
    if type(value) not in (int, float) or not above < value < MAX_FLOAT:
        raise ValueError(f"expected {name} to be a finite number above {above:g}, got {value!r}")
    return float(value)


def _numbers(key: str, value: Any) -> Any:
    """Returns the numbers of a key: a tuple of a list that has one for each frequency."""
    if not key.endswith(("short_factor", "long_factor")):
        return as_number(key, value, above=0.0)
    if not isinstance(value, list | tuple):
        raise ValueError(f"expected {key} of longrope to be a list, got {value!r}")
    return tuple(as_number(key, number, above=0.0) for number in value)


def _with_defaults(kind: str, rope: dict[str, Any], max_seq_len: int | None) -> dict[str, Any]:
    """Returns the settings with what transformers puts where a key is missing."""
    if kind not in ("yarn", "longrope"):
        return rope
    rope = {key: value for key, value in rope.items() if value is not None}
    original = rope.setdefault(_ORIGINAL, max_seq_len)
    if max_seq_len and original:
        rope.setdefault("factor", max_seq_len / original)
    factor = rope.get("factor", 1.0)
    if kind == "yarn":
        rope = {"beta_fast": 32.0, "beta_slow": 1.0} | rope
        default = 1.0 + 0.1 * math.log(max(factor, 1.0))
    else:
        default = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(original or math.e))
    return {"attention_factor": default} | rope


def write_rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Returns the settings, in the newer spelling, that `read_rope` reads back as the same."""
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    if scaling is None:
        return rope
    values = {key: getattr(scaling, field) for key, field in _KEYS[scaling.kind].items()}
    return rope | {"rope_type": scaling.kind, **values}

"""Hugging Face's settings of rotary embeddings, in all their spellings, and back."""

import math
from collections.abc import Mapping
from typing import Any

from jspec.models.config import MAX_FLOAT, ROPE_KINDS, RopeScaling

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
    # Inside the RoPE settings in the newer spelling, beside them in the older one.
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
    return tuple(as_number(key, one, above=0.0) for one in value)


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

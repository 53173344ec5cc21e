"""From a config of plain values, as JSON has them, to the experiment that it describes."""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.drafters import DrafterOptions
from jspec.errors import InputError, whole_number
from jspec.experiments.spec import (
    EstimateSpec,
    Experiment,
    PairSpec,
    TableSpec,
    TheorySpec,
)
from jspec.experiments.way_spec import WaySpec
from jspec.request import Settings

_GROUPS = {"table": TableSpec, "estimate": EstimateSpec, "theory": TheorySpec}
_OPTIONS = tuple(field.name for field in dataclasses.fields(DrafterOptions))
_SETTINGS = tuple(field.name for field in dataclasses.fields(Settings) if field.name != "seed")


def read_experiment(plain: Mapping[str, Any]) -> Experiment:
    """Returns the experiment that a config describes.

    Args:
      plain: the fields of `Experiment` as JSON has them, settings without a seed; what is not there
        has its default.

    Raises:
      InputError: an unknown field, a value of another type or out of range; it says which.
    """
    fields = take_fields("", plain, Experiment())
    fields["ways"] = {
        label: _read_way(f"ways.{label}", way) for label, way in fields.get("ways", {}).items()
    }
    max_new_tokens = fields.get("max_new_tokens", Experiment.max_new_tokens)
    fields["settings"] = {
        label: _read_settings(f"settings.{label}", own, max_new_tokens)
        for label, own in fields.get("settings", {}).items()
    }
    fields["predict"] = {
        label: _read_pair(f"predict.{label}", pair)
        for label, pair in fields.get("predict", {}).items()
    }
    for name, make in _GROUPS.items():
        if name in fields:
            fields[name] = make(**take_fields(f"{name}.", fields[name], make()))
    experiment = Experiment(**fields)
    for name in ("ways", "settings"):
        if experiment.needs_prompts and not fields[name]:
            raise InputError(f"expected the config to have {name}, got none")
    return experiment


def check_known(prefix: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Checks names of fields.

    Args:
      prefix: what comes before them, such as "estimate.".
      names: of fields.
      known: those that there are.

    Raises:
      InputError: there is no such field.
    """
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"expected {', '.join(known)}"
            raise InputError(f"the config has no field {prefix + name!r}; {hint}")


def _read_way(name: str, plain: Any) -> WaySpec:
    _check_group(name, plain)
    fields = take_fields(f"{name}.", plain, WaySpec())
    options = fields.get("options", {})
    check_known(f"{name}.options.", list(options), _OPTIONS)
    try:
        fields["options"] = DrafterOptions(**{key: _tuple(v) for key, v in options.items()})
        return WaySpec(**fields)
    except (InputError, TypeError) as error:
        raise InputError(f"{name}: {error}") from None


def _read_pair(name: str, plain: Any) -> PairSpec:
    _check_group(name, plain)
    return PairSpec(**take_fields(f"{name}.", plain, PairSpec()))


def _read_settings(name: str, plain: Any, max_new_tokens: int) -> Settings:
    _check_group(name, plain)
    check_known(f"{name}.", list(plain), _SETTINGS)
    fields: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    fields |= {key: _tuple(value) for key, value in plain.items()}
    try:
        return Settings(**fields)
    except (InputError, TypeError, ValueError) as error:
        raise InputError(f"{name}: {error}") from None


def take_fields(prefix: str, plain: Mapping[str, Any], defaults: Any) -> dict[str, Any]:
    """Returns a dataclass's fields from plain values, of the types that its defaults have.

    Args:
      prefix: what comes before their names in messages, such as "estimate.".
      plain: the values, as JSON has them.
      defaults: one of the dataclass.

    Raises:
      InputError: an unknown field, or a value of another type.
    """
    expected = {f.name: getattr(defaults, f.name) for f in dataclasses.fields(defaults)}
    check_known(prefix, list(plain), list(expected))
    return {key: _cast(prefix + key, value, expected[key]) for key, value in plain.items()}


def _cast(name: str, value: Any, default: Any) -> Any:
    """Returns a plain value as its field wants it."""
    if isinstance(default, Mapping) or dataclasses.is_dataclass(default):
        _check_group(name, value)
    elif isinstance(default, tuple):
        if not isinstance(value, list | tuple):
            raise InputError(f"expected {name} to be a list, got {value!r}")
        return tuple(_cast(name, one, default[0] if default else None) for one in value)
    elif isinstance(default, bool):
        if not isinstance(value, bool):
            raise InputError(f"expected {name} to be true or false, got {value!r}")
    elif isinstance(default, float):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"expected {name} to be a number, got {value!r}")
        return float(value)
    elif isinstance(default, int) and not name.endswith("num_draft_tokens"):
        return whole_number(name, value)
    elif isinstance(default, str) and not isinstance(value, str):
        raise InputError(f"expected {name} to be a text, got {value!r}")
    elif default is None and not isinstance(value, str | int | float | None):
        raise InputError(f"expected {name} to be a text, a number or None, got {value!r}")
    return value


def _check_group(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise InputError(f"expected {name} to be a group of fields, got {value!r}")


def _tuple(value: Any) -> Any:
    """Returns a value of JSON without lists, and with token ids for keys."""
    if isinstance(value, Mapping):
        return {int(key): one for key, one in value.items()}
    return tuple(map(_tuple, value)) if isinstance(value, list) else value

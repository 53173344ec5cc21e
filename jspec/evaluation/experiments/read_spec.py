"""From a config of plain values, as JSON has them, to the experiment that it describes."""

from collections.abc import Mapping
from typing import Any

from jspec.common.errors import InputError
from jspec.common.plain_values import cast, check_group, take_fields
from jspec.drafters import DrafterOptions
from jspec.evaluation.experiments.check_estimate import check_estimate
from jspec.evaluation.experiments.method_spec import MethodSpec
from jspec.evaluation.experiments.pair_spec import PairSpec
from jspec.evaluation.experiments.spec import EstimateSpec, Experiment, TableSpec, TheorySpec
from jspec.generation.request import Settings

_GROUPS = {"table": TableSpec, "estimate": EstimateSpec, "theory": TheorySpec}
_NEEDED = {
    "generate": ("methods", "settings"),
    "estimate": ("methods", "settings"),
    "predict": ("predict",),
}
_BIAS = "logit_bias"


def read_experiment(plain: Mapping[str, Any]) -> Experiment:
    """Returns the experiment that a config describes.

    Args:
      plain: the fields of `Experiment` as JSON has them, settings without a seed; what is not there
        has its default.

    Raises:
      InputError: an unknown field, a value of another type or out of range, or nothing to measure;
        it says which field.
    """
    fields = take_fields("", plain, Experiment())
    fields["methods"] = {
        label: _read_method(f"methods.{label}", method)
        for label, method in fields.get("methods", {}).items()
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
    for name, kind in _GROUPS.items():
        if name in fields:
            fields[name] = kind(**take_fields(f"{name}.", fields[name], kind()))
    experiment = Experiment(**fields)
    for name in _NEEDED.get(experiment.kind, ()):
        if not fields[name]:
            raise InputError(f"expected the config to have {name}, got none")
    if experiment.kind == "estimate":
        check_estimate(experiment)
    return experiment


def _read_method(name: str, plain: Any) -> MethodSpec:
    fields = take_fields(f"{name}.", plain, MethodSpec())
    options = take_fields(f"{name}.options.", fields.get("options", {}), DrafterOptions())
    try:
        fields["options"] = DrafterOptions(**options)
        return MethodSpec(**fields)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def _read_pair(name: str, plain: Any) -> PairSpec:
    return PairSpec(**take_fields(f"{name}.", plain, PairSpec()))


def _read_settings(name: str, plain: Any, max_new_tokens: int) -> Settings:
    check_group(name, plain)
    rest = {key: value for key, value in plain.items() if key != _BIAS}
    fields: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    fields |= take_fields(f"{name}.", rest, Settings(), without=["seed"])
    if _BIAS in plain:
        fields[_BIAS] = _read_bias(f"{name}.{_BIAS}", plain[_BIAS])
    try:
        return Settings(**fields)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def _read_bias(name: str, plain: Any) -> tuple[tuple[int, float], ...]:
    """Returns (token id, number) pairs; the ids of a group are texts, as JSON has keys."""
    try:
        pairs = plain.items() if isinstance(plain, Mapping) else [(one, two) for one, two in plain]
        return tuple((_token_id(one), cast(name, two, float)) for one, two in pairs)
    except (TypeError, ValueError):
        raise InputError(f"expected {name} to be numbers by token ids, got {plain!r}") from None


def _token_id(value: Any) -> int:
    if isinstance(value, bool | float):
        raise TypeError
    return int(value)

"""From a config of plain values, as JSON has them, to the experiment that it describes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jspec.common.dataclass_fields import cast, read_fields
from jspec.common.errors import InputError, prefixed_errors
from jspec.drafters import DrafterOptions, options_read
from jspec.evaluation.experiments.method_spec import MethodSpec
from jspec.evaluation.experiments.spec import (
    EstimateSpec,
    Experiment,
    PairSpec,
    TableSpec,
    TheorySpec,
)
from jspec.generation.batch import needed_switches
from jspec.generation.request import Settings

_GROUPS = {"table": TableSpec, "estimate": EstimateSpec, "theory": TheorySpec}
_NEEDED = {
    "generate": ("methods", "settings"),
    "estimate": ("methods", "settings"),
    "predict": ("predict",),
}


def read_experiment(plain: Mapping[str, Any]) -> Experiment:
    """Returns the experiment that a config describes.

    Args:
      plain: the fields of `Experiment` as JSON has them, settings without a seed; missing fields
        have their defaults.

    Raises:
      InputError: an unknown field, a value of another type or out of range, or nothing to measure;
        the message names the field.
    """
    fields = read_fields(Experiment, plain)
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
        label: PairSpec(**read_fields(PairSpec, pair, f"predict.{label}."))
        for label, pair in fields.get("predict", {}).items()
    }
    for name in _GROUPS.keys() & fields.keys():
        fields[name] = _GROUPS[name](**read_fields(_GROUPS[name], fields[name], f"{name}."))
    experiment = Experiment(**fields)
    for name in _NEEDED.get(experiment.kind, ()):
        if not fields[name]:
            raise InputError(f"expected the config to have {name}, got none")
    if experiment.kind == "estimate":
        _check_estimate(experiment)
    return experiment


def _read_method(name: str, plain: Any) -> MethodSpec:
    fields = read_fields(MethodSpec, plain, f"{name}.")
    options = read_fields(DrafterOptions, fields.get("options", {}), f"{name}.options.")
    with prefixed_errors(name):
        fields["options"] = DrafterOptions(**options)
        return MethodSpec(**fields)


def _read_settings(name: str, plain: Any, max_new_tokens: int) -> Settings:
    plain = dict(cast(name, plain, Mapping))
    bias = plain.pop("logit_bias", ())
    fields: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    fields |= read_fields(Settings, plain, f"{name}.", without=["seed"])
    fields["logit_bias"] = _read_bias(f"{name}.logit_bias", bias)
    with prefixed_errors(name):
        return Settings(**fields)


def _read_bias(name: str, plain: Any) -> tuple[tuple[int, float], ...]:
    """Returns (token id, number) pairs from a list of them, or a group whose ids are texts."""
    try:
        pairs = plain.items() if isinstance(plain, Mapping) else [(one, two) for one, two in plain]
        if any(isinstance(token_id, bool | float) for token_id, _ in pairs):
            raise TypeError
        return tuple((int(token_id), cast(name, number, float)) for token_id, number in pairs)
    except (TypeError, ValueError):
        raise InputError(f"expected {name} to be numbers by token ids, got {plain!r}") from None


def _check_estimate(experiment: Experiment) -> None:
    """Checks that the kind "estimate" is not asked for anything that it would ignore.

    It computes how likely the first draft after every token of an answer is accepted under
    `rejection`: a rule, a number of drafts, a clock and a batch have no part in it.

    Raises:
      InputError: a field that is not read is not at its default, settings have processors, or a
        drafter's distribution is not known without drafting.
    """
    for name in ("turns", "repeats", "batch_sizes"):
        _check_default(name, experiment, name)
    for label, method in experiment.methods.items():
        for name in ("num_draft_tokens", "acceptance"):
            _check_default(f"methods.{label}.{name}", method, name)
        name = f"methods.{label}.drafter"
        if method.drafter == "none":
            raise InputError(f"expected {name} to draft with kind 'estimate', got 'none'")
        if "draft_head" in options_read(method.drafter, method.options):
            raise InputError(f"expected {name} without a trained head with kind 'estimate', "
                             f"got {method.drafter!r}")  # fmt: skip
    for label, settings in experiment.settings.items():
        processors = needed_switches([settings]).processors
        if processors:
            names = ", ".join(processor.name for processor in processors)
            raise InputError(f"expected settings.{label} to have temperature and filters only with "
                             f"kind 'estimate', got {names}")  # fmt: skip


def _check_default(name: str, spec: Experiment | MethodSpec, field: str) -> None:
    value = getattr(spec, field)
    (default,) = (one.default for one in dataclasses.fields(spec) if one.name == field)
    if value != default:
        shown, got = (list(v) if isinstance(v, tuple) else v for v in (default, value))
        raise InputError(
            f"expected {name} to be {shown!r} with kind 'estimate', which does not read it; "
            f"got {got!r}"
        )

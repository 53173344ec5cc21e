"""From a config of plain values, as JSON has them, to the experiment that it describes."""

from collections.abc import Mapping
from typing import Any

from jspec.common.dataclass_fields import cast, read_fields
from jspec.common.errors import InputError, prefixed_errors
from jspec.drafters import DrafterOptions, entries_of
from jspec.generation.batch import needed_switches
from jspec.generation.request import SamplingParams
from jspec.lab.experiments.method_spec import MethodSpec
from jspec.lab.experiments.spec import EstimateSpec, Experiment, PairSpec, TableSpec

_GROUPS = {"table": TableSpec, "estimate": EstimateSpec}
_LABELLED = {"methods": MethodSpec, "predict": PairSpec}


def read_experiment(plain: Mapping[str, Any]) -> Experiment:
    """Returns the experiment with fields as JSON has them, settings without a seed.

    Raises:
      InputError: an unknown field, a value of another type or out of range, or nothing to measure;
        the message names the field.
    """
    fields = read_fields(Experiment, plain)
    for name, kind in _LABELLED.items():
        groups = fields.get(name, {}).items()
        fields[name] = {label: _read_group(kind, f"{name}.{label}", own) for label, own in groups}
    max_new_tokens = fields.get("max_new_tokens", Experiment.max_new_tokens)
    fields["settings"] = {
        label: _read_settings(f"settings.{label}", own, max_new_tokens)
        for label, own in fields.get("settings", {}).items()
    }
    for name in _GROUPS.keys() & fields.keys():
        fields[name] = _read_group(_GROUPS[name], name, fields[name])
    experiment = Experiment(**fields)
    needed = ("methods", "settings") if experiment.needs_prompts else ("predict",)
    for name in () if experiment.kind == "theory" else needed:
        if not fields[name]:
            raise InputError(f"expected the config to have {name}, got none")
    if experiment.kind == "estimate":
        _check_estimate(experiment)
    return experiment


def _read_group(kind: type, name: str, plain: Any) -> Any:
    fields = read_fields(kind, plain, f"{name}.")
    if kind is MethodSpec:
        options = fields.get("options", {})
        fields["options"] = _read_group(DrafterOptions, f"{name}.options", options)
    with prefixed_errors(name):
        return kind(**fields)


def _read_settings(name: str, plain: Any, max_new_tokens: int) -> SamplingParams:
    plain = dict(cast(name, plain, Mapping))
    bias = _read_bias(f"{name}.logit_bias", plain.pop("logit_bias", {}))
    fields = read_fields(SamplingParams, plain, f"{name}.", without=["seed"])
    with prefixed_errors(name):
        return SamplingParams(**{"max_new_tokens": max_new_tokens, "logit_bias": bias} | fields)


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
    """
    _check_defaults(experiment, "", ("turns", "repeats", "batch_sizes", "mesh"))
    for label, method in experiment.methods.items():
        _check_defaults(method, f"methods.{label}.", ("num_draft_tokens", "acceptance"))
        name = f"methods.{label}.drafter"
        if method.drafter == "none":
            raise InputError(f"expected {name} to draft with kind 'estimate', got 'none'")
        needs = {entry.needs for entry in entries_of(method.drafter)}
        if "logits" in needs:
            raise InputError(f"expected {name} to learn from the text alone with kind 'estimate', "
                             f"got {method.drafter!r}")  # fmt: skip
        if "draft_head" in needs:
            raise InputError(f"expected {name} without a trained head with kind 'estimate', "
                             f"got {method.drafter!r}")  # fmt: skip
    for label, settings in experiment.settings.items():
        if processors := needed_switches([settings]).processors:
            names = ", ".join(processor.name for processor in processors)
            raise InputError(f"expected settings.{label} to have temperature and filters only with "
                             f"kind 'estimate', got {names}")  # fmt: skip


def _check_defaults(spec: Experiment | MethodSpec, prefix: str, names: tuple[str, ...]) -> None:
    for name in names:
        default, value = getattr(type(spec), name), getattr(spec, name)
        if value != default:
            shown, got = (list(v) if isinstance(v, tuple) else v for v in (default, value))
            raise InputError(f"expected {prefix}{name} to be {shown!r} with kind 'estimate', which "
                             f"does not read it; got {got!r}")  # fmt: skip

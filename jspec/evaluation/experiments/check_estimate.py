"""What the kind "estimate" does not read, and so refuses.

It computes how likely the first draft after every token of an answer is kept under `rejection`: a
rule, a number of drafts, a clock and a batch have no part in it.
"""

import dataclasses

from jspec.common.errors import InputError
from jspec.drafters import options_read
from jspec.evaluation.experiments.method_spec import MethodSpec
from jspec.evaluation.experiments.spec import Experiment
from jspec.generation.batch import needed_switches

_UNREAD = ("turns", "repeats", "batch_sizes")
_UNREAD_OF_WAYS = ("num_draft_tokens", "acceptance")


def check_estimate(experiment: Experiment) -> None:
    """Checks that an experiment of kind "estimate" asks for nothing that it would not get.

    Raises:
      InputError: a field that is not read is not at its default, a drafter whose distribution is
        not known without drafting, or settings with processors; it says which.
    """
    for name in _UNREAD:
        _check_default(name, experiment, name)
    for label, method in experiment.methods.items():
        for name in _UNREAD_OF_WAYS:
            _check_default(f"methods.{label}.{name}", method, name)
        _check_drafter(f"methods.{label}.drafter", method)
    for label, settings in experiment.settings.items():
        processors = needed_switches([settings]).processors
        if processors:
            names = ", ".join(processor.name for processor in processors)
            raise InputError(
                f"expected settings.{label} to have temperature and filters only with kind "
                f"'estimate', got {names}"
            )


def _check_default(name: str, spec: Experiment | MethodSpec, field: str) -> None:
    value = getattr(spec, field)
    (default,) = (one.default for one in dataclasses.fields(spec) if one.name == field)
    if value != default:
        shown, got = (list(v) if isinstance(v, tuple) else v for v in (default, value))
        raise InputError(
            f"expected {name} to be {shown!r} with kind 'estimate', which does not read it; "
            f"got {got!r}"
        )


def _check_drafter(name: str, method: MethodSpec) -> None:
    if method.drafter == "none":
        raise InputError(f"expected {name} to draft with kind 'estimate', got 'none'")
    if "draft_head" in options_read(method.drafter, method.options):
        raise InputError(
            f"expected {name} without a trained head with kind 'estimate', got {method.drafter!r}"
        )

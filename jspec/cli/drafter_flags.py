"""Flags that say what drafts are proposed: `--drafter`, and one for each drafter's option."""

import dataclasses
from typing import Any, cast

from absl import flags

from jspec.cli.program import list_flags
from jspec.common.errors import InputError
from jspec.drafters import DRAFTERS, DrafterOptions

_DRAFTER = flags.DEFINE_string(
    "drafter", None, f"What proposes tokens: {', '.join(DRAFTERS)}, or several joined by +. "
    "Default: prompt_lookup, with +model if there is a --draft, else with +eagle if jspec has a "
    "head for the target."
)  # fmt: skip


def _define(field: dataclasses.Field[Any]) -> flags.FlagHolder:
    about, default = field.metadata, cast(Any, field.default)
    name = about["flag"] or field.name
    if about["among"]:
        return flags.DEFINE_enum(name, default, about["among"], about["help"])
    define = {int: flags.DEFINE_integer, float: flags.DEFINE_float}
    return define.get(field.type, flags.DEFINE_string)(name, default, about["help"])


_OPTIONS = {field: _define(field) for field in dataclasses.fields(DrafterOptions)}
list_flags(
    "Drafting",
    "drafter num_draft_tokens draft_head draft_confidence draft_vocab_size",
    "costs_file " + " ".join(holder.name for holder in _OPTIONS.values()),
)


def read_drafter() -> tuple[str | None, DrafterOptions]:
    """Returns the drafter that the flags ask for, None for the default, and its options.

    Raises:
      InputError: an option out of its range.
    """
    values = {}
    for field, holder in _OPTIONS.items():
        parse, value = field.metadata["parse"], holder.value
        values[field.name] = value if parse is None or value is None else parse(value)
    return _DRAFTER.value, DrafterOptions(**values)


def read_options(instead: str = "--drafters") -> DrafterOptions:
    """Returns the options, for a program that compares drafters, which the flag `instead` names.

    Raises:
      InputError: an option out of its range, or --drafter.
    """
    drafter, options = read_drafter()
    if drafter is not None:
        raise InputError(f"expected {instead} alone, which lists drafters; got --drafter={drafter}")
    return options

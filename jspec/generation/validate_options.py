"""Checks that a run reads every option it is given, as `drafters.check_options` does for theirs."""

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from jspec.common.errors import InputError, check_type
from jspec.drafters import (
    DEFAULT_NUM_DRAFT_TOKENS,
    DRAFTERS,
    DrafterEntry,
    DrafterOptions,
    choose_drafter,
    draws_from_distribution,
    name_of,
    read_options,
)
from jspec.drafters.spec import LIKELIEST
from jspec.generation.request import SamplingParams
from jspec.speculation.acceptance import RULES, TIMING_RULES, RuleOptions, get_rule
from jspec.speculation.acceptance.types import AcceptanceRule, Temperatures
from jspec.speculation.types import Drafter
from jspec.weights.resolver import LoadedModel
from jspec.weights.vocabulary import used_vocab_size


def gather_options(
    make: Callable[..., Any], options: dict[str, Any], target: str, *, has_draft: bool
) -> dict[str, Any]:
    """Returns a `Generator`'s options, with those of drafters and rules in their dataclasses.

    They may be given by the names of their flags. All is checked before models are loaded; `make`
    is what takes them, all by keyword.

    Raises:
      InputError: a drafter or an option that does not fit, or an option that there is not.
    """
    options, names = dict(options), dict.fromkeys(inspect.signature(make).parameters)
    names |= {field.metadata["flag"] or field.name: None for field in fields(DrafterOptions)}
    names |= dict.fromkeys(vars(DrafterOptions()) | vars(RuleOptions()))
    for name in options.keys() - names.keys():
        near = difflib.get_close_matches(name, names, 1) or [", ".join(names)]
        raise InputError(f"expected an option such as {near[0]}, got {name!r}, which is none")
    given = options.pop("drafter_options", DrafterOptions())
    check_type("drafter_options", given, DrafterOptions)
    drafter_options = read_options(options, given)
    given = options.pop("rule_options", RuleOptions())
    check_type("rule_options", given, RuleOptions)
    own = {name: options.pop(name) for name in vars(given).keys() & options.keys()}
    drafter = options.get("drafter")
    if drafter is None or isinstance(drafter, str | DrafterEntry):
        choose_drafter(drafter, has_draft=has_draft, target=target, options=drafter_options)
    rule_options = dataclasses.replace(given, **own)
    return options | {"drafter_options": drafter_options, "rule_options": rule_options}


def check_num_draft_tokens(
    num_draft_tokens: int | str, drafter: str, options: DrafterOptions | None = None
) -> None:
    """Checks that there are drafts to count, unless their number is the default.

    Raises:
      InputError: there are none; or a number that varies, of drafts that are drawn as a tree.
    """
    if num_draft_tokens == "auto" and options is not None and options.tree_draws != LIKELIEST:
        raise InputError(
            f"expected num_draft_tokens as a number with tree_draws={options.tree_draws}, got "
            "'auto'"
        )
    if drafter == "none" and num_draft_tokens != DEFAULT_NUM_DRAFT_TOKENS:
        raise InputError(
            f"expected num_draft_tokens with a drafter that drafts, got {num_draft_tokens!r} with "
            "'none'"
        )


def rules_that_read(option: str) -> list[str]:
    """Returns the acceptance rules that change with the value of a field of `RuleOptions`."""
    zero, one = (RuleOptions(**{option: value}) for value in (0.0, 1.0))
    names = [*RULES, *TIMING_RULES]
    return [name for name in names if get_rule(name, zero) is not get_rule(name, one)]


def is_rule_option_read(option: str, acceptance: str, drafter: str) -> bool:
    """Returns whether a rule reads an option, which it does where there are drafts to accept."""
    return drafter != "none" and acceptance in rules_that_read(option)


def check_rule_option(option: str, acceptance: str, drafter: str) -> None:
    """Checks that a rule reads an option.

    Raises:
      InputError: it does not, or there are no drafts to accept.
    """
    if not is_rule_option_read(option, acceptance, drafter):
        raise InputError(
            f"expected {option} with a drafter that drafts and an acceptance rule that reads it "
            f"({', '.join(rules_that_read(option))}), got it with {drafter!r} and {acceptance!r}"
        )


def check_rule_options(options: RuleOptions, acceptance: str, drafter: str) -> None:
    """Checks that a rule reads each option that is not at its default; see `check_rule_option`."""
    for field in fields(options):
        if getattr(options, field.name) != field.default:
            check_rule_option(field.name, acceptance, drafter)


def check_temperature(acceptance: str, expected: Temperatures, temperature: float) -> None:
    """Checks that an acceptance rule, made for the temperatures `expected`, can be used at one.

    Raises:
      InputError: if it cannot.
    """
    is_wrong = {Temperatures.ZERO: temperature > 0, Temperatures.POSITIVE: temperature == 0}
    if is_wrong.get(expected, False):
        raise InputError(
            f"the acceptance rule {acceptance!r} expects temperature {expected.value}, "
            f"got {temperature}"
        )


def check_beams(
    settings: SamplingParams,
    target: LoadedModel,
    batch_size: int,
    acceptance: str,
) -> None:
    """Checks that a beam search, if one is asked for, can be done as everything else is.

    Raises:
      InputError: if it cannot.
    """
    number, vocab_size = settings.num_beams, used_vocab_size(target)
    for is_good, expected, found in (
        (number <= vocab_size, f"num_beams of at most the vocabulary's {vocab_size}", number),
        (batch_size == 1, f"batch_size 1 with num_beams {number}", batch_size),
        (
            acceptance in ("rejection", "greedy"),  # by default, or temperature 0 said once more
            f"acceptance rejection or greedy with num_beams {number}, as beams are not drawn",
            repr(acceptance),
        ),
    ):
        if number > 1 and not is_good:
            raise InputError(f"expected {expected}, got {found}")


def check_draft_temperature(
    settings: SamplingParams, drafters: Sequence[tuple[str | DrafterEntry, DrafterOptions]]
) -> None:
    """Checks that a draft temperature, if there is one, is read by one of the drafters.

    Raises:
      InputError: the drafts of all of them follow from the context, or there are none.
    """
    if settings.draft_temperature is None or any(draws_from_distribution(*one) for one in drafters):
        return
    readers = [name for name in DRAFTERS if draws_from_distribution(name, DrafterOptions())]
    names = ", ".join(repr(name_of(drafter)) for drafter, _ in drafters)
    raise InputError(
        f"expected draft_temperature with a drafter that draws from a distribution "
        f"({', '.join(readers)}, or ngram with ngram_probs=sampled), got it with {names}"
    )


def settings_read_by(
    drafter: str, options: DrafterOptions, settings: SamplingParams
) -> SamplingParams:
    """Returns the settings without a draft temperature that a drafter of that name ignores."""
    if draws_from_distribution(drafter, options):
        return settings
    return dataclasses.replace(settings, draft_temperature=None)


def check_trees(rule: AcceptanceRule, drafter: Drafter, numbers: Sequence[int]) -> None:
    """Checks that a rule knows the trees of a drafter; and a number that varies, scores.

    Raises:
      InputError: if not.
    """
    if rule.tree is None:
        able = [name for name in RULES if get_rule(name).tree is not None]
        raise InputError(
            f"expected an acceptance rule for trees ({', '.join(able)}) with tree_depth, got one "
            "for chains"
        )
    if numbers and (others := {each.drafter for each in drafter.kinds if not each.is_tree}):
        raise InputError(
            f"expected num_draft_tokens as a number with trees of {', '.join(sorted(others))}, got "
            "'auto', which needs `scores` in their proposals, and is_tree in their kinds"
        )

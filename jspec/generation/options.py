"""How drafts are made and accepted: the options of a Generator, checked once.

A run reads every option that it is given; what it would ignore is refused.
"""

import dataclasses
import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jspec.common.errors import InputError, check_type
from jspec.drafters import (
    DEFAULT_NUM_DRAFT_TOKENS,
    DRAFTERS,
    DrafterEntry,
    DrafterOptions,
    DrafterSpec,
    choose_drafter,
    draws_from_distribution,
    entries_of,
    name_of,
    read_options,
    with_shipped_head,
)
from jspec.drafters.options import LIKELIEST
from jspec.generation.costs import RoundCosts
from jspec.generation.request import SamplingParams
from jspec.speculation.acceptance import RULES, TIMING_RULES, RuleOptions, get_rule
from jspec.speculation.types import AcceptanceRule, Temperatures
from jspec.weights.resolver import LoadedModel, has_mtp_layer, have_same_encoder
from jspec.weights.vocabulary import have_same_tokenizer, shared_vocab_size, used_vocab_size

RULE_DEFAULTS = RuleOptions()
DRAFTER_DEFAULTS = DrafterOptions()
_RULE_OBJECT = "own rule"  # the name of a rule that was given as an object


@dataclasses.dataclass(frozen=True)
class Method:
    """A drafter and an acceptance rule with their options; see `choose_method`.

    Attributes:
      drafter: a name from `jspec.drafters.DRAFTERS`, or several joined by "+", of which the first
        that has a proposal makes it. Or your own `DrafterEntry`.
      num_draft_tokens: number of drafts a round; "auto" chooses it in every round.
      acceptance: the acceptance rule. "rejection", "block", "k_seq" and "coupled" keep the target's
        distribution, and so does "greedy", for temperature 0; "lenient", "lenient_argmax" and
        "typical" do not. Or an `AcceptanceRule` of your own.
      drafter_options: options of the drafters.
      rule_options: options of the last three rules.
      costs: costs of rounds, for "auto"; None measures them once on this machine.

    Raises:
      InputError: a value of another type, a rule that there is not, or an option that is not read.
    """

    drafter: str | DrafterEntry
    num_draft_tokens: int | str = DEFAULT_NUM_DRAFT_TOKENS
    acceptance: str | AcceptanceRule = "rejection"
    drafter_options: DrafterOptions = DRAFTER_DEFAULTS
    rule_options: RuleOptions = RULE_DEFAULTS
    costs: RoundCosts | None = None

    def __post_init__(self) -> None:
        check_type("acceptance", self.acceptance, (str, AcceptanceRule))
        drafter = name_of(self.drafter)
        check_num_draft_tokens(self.num_draft_tokens, drafter, self.drafter_options)
        _ = self.rule
        check_rule_options(self.rule_options, self.rule_name, drafter)
        if self.drafter_options.draft_memory and not self.rule.is_lossless:
            raise InputError(
                "expected draft_memory with an acceptance rule that keeps the target's "
                f"distribution, or answers would depend on earlier ones; got {self.rule_name!r}"
            )

    @property
    def rule(self) -> AcceptanceRule:
        """The acceptance rule."""
        if isinstance(self.acceptance, AcceptanceRule):
            return self.acceptance
        return get_rule(self.acceptance, self.rule_options)

    @property
    def rule_name(self) -> str:
        """The acceptance rule's name; a rule that was given as an object has no name."""
        return self.acceptance if isinstance(self.acceptance, str) else _RULE_OBJECT


def choose_method(
    options: Mapping[str, Any],
    target: str | LoadedModel,
    *,
    has_draft: bool,
    known: Collection[str] = (),
) -> Method:
    """Returns the method that options ask for; models need not be loaded yet.

    Args:
      options: fields of `Method`, and options of drafters and rules by the names of their flags.
        The drafter None takes "prompt_lookup" and what `choose_drafter` adds.
      target: the name by which the target was asked for, or the target.
      has_draft: whether there is a draft model.
      known: names of further options, for the message about an unknown option.

    Raises:
      InputError: a drafter or an option that does not fit, or an unknown option.
    """
    values: dict[str, Any] = {"drafter_options": DRAFTER_DEFAULTS, "rule_options": RULE_DEFAULTS}
    values |= options
    drafter = values.pop("drafter", None)
    check_type("drafter", drafter or "", (str, DrafterEntry))
    check_type("drafter_options", values["drafter_options"], DrafterOptions)
    check_type("rule_options", values["rule_options"], RuleOptions)
    rule_values = {name: values.pop(name) for name in vars(RULE_DEFAULTS).keys() & values.keys()}
    values["rule_options"] = dataclasses.replace(values["rule_options"], **rule_values)
    values["drafter_options"] = read_options(values, values["drafter_options"])
    fields = [field.name for field in dataclasses.fields(Method)]
    for name in values.keys() - set(fields):
        flags = [
            field.metadata["flag"] or field.name for field in dataclasses.fields(DrafterOptions)
        ]
        names = [*known, *fields, *vars(RULE_DEFAULTS), *vars(DRAFTER_DEFAULTS), *flags]
        near = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(names)}"
        raise InputError(f"unknown option {name!r}: {hint}")
    drafter = choose_drafter(
        drafter,
        has_draft=has_draft,
        target=target.name if isinstance(target, LoadedModel) else target,
        has_mtp=drafter is None and not has_draft and has_mtp_layer(target),
        options=values["drafter_options"],
    )
    return Method(drafter, **values)


def make_spec(
    target: LoadedModel,
    draft: LoadedModel | None,
    drafter: str | DrafterEntry,
    options: DrafterOptions,
    num_draft_tokens: int,
) -> DrafterSpec:
    """Returns what a drafter is built from; a head that jspec ships need not be in the options.

    Raises:
      InputError: a draft model with another tokenizer, for a drafter that does not translate.
    """
    _check_encoders(target, draft)
    draft_tokenizer = None
    drafting = [entry for entry in entries_of(drafter) if entry.needs == "draft"]
    if draft is not None and all(entry.takes_any_tokenizer for entry in drafting):
        draft_tokenizer = None if have_same_tokenizer(target, draft) else draft.tokenizer
    return DrafterSpec(
        num_draft_tokens=num_draft_tokens,
        target_config=target.own_config,
        vocab_size=used_vocab_size(target) if draft_tokenizer else shared_vocab_size(target, draft),
        draft_config=None if draft is None else draft.own_config,
        dtype=target.params["embedding"].dtype,
        draft_params=None if draft is None else draft.params,
        options=with_shipped_head(drafter, options, target.name),
        tokenizer=target.tokenizer,
        draft_tokenizer=draft_tokenizer,
        shares_encoder=draft is not None and have_same_encoder(target, draft),
    )


def _check_encoders(target: LoadedModel, draft: LoadedModel | None) -> None:
    """Checks that a draft model can read what the target reads.

    Raises:
      InputError: only one of them has an encoder, or they read other sources, or it reads fewer
        tokens, or other tokens.
    """
    if draft is None:
        return
    wanted, given = target.config.encoder, draft.config.encoder
    if wanted is None and given is None:
        return

    def kind(model: LoadedModel) -> str:
        encoder = model.config.encoder
        if encoder is None:
            return "a decoder alone"
        source = f"{encoder.num_mels} mels" if encoder.is_audio else "texts"
        return f"an encoder-decoder of at most {encoder.max_len} positions of {source}"

    if kind(target) != kind(draft):
        raise InputError(f"expected a draft like the target, {kind(target)}; got {kind(draft)}")
    if not have_same_tokenizer(target, draft):
        raise InputError("expected target and draft of one tokenizer, as both read the source")


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
    (field,) = (field for field in dataclasses.fields(RuleOptions) if field.name == option)
    low, high = (RuleOptions(**{option: value}) for value in field.metadata["between"])
    names = [*RULES, *TIMING_RULES]
    return [name for name in names if get_rule(name, low) is not get_rule(name, high)]


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
    for field in dataclasses.fields(options):
        if getattr(options, field.name) != field.default:
            check_rule_option(field.name, acceptance, drafter)


def check_temperature(acceptance: str, expected: Temperatures, temperature: float) -> None:
    """Checks that a rule made for the temperatures `expected` can be used at `temperature`.

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
    for is_good, expected, value in (
        (number <= vocab_size, f"num_beams of at most the vocabulary's {vocab_size}", number),
        (batch_size == 1, f"batch_size 1 with num_beams {number}", batch_size),
        (
            acceptance in ("rejection", "greedy"),  # by default, or temperature 0 said once more
            f"acceptance rejection or greedy with num_beams {number}, as beams are not drawn",
            repr(acceptance),
        ),
    ):
        if number > 1 and not is_good:
            raise InputError(f"expected {expected}, got {value}")


def check_draft_sampling(
    settings: SamplingParams, drafters: Sequence[tuple[str | DrafterEntry, DrafterOptions]]
) -> None:
    """Checks that the drafter's own temperature, top-k and top-p are read by one of the drafters.

    Raises:
      InputError: the drafts of all of them follow from the context, or there are none.
    """
    names = ("draft_temperature", "draft_top_k", "draft_top_p")
    given = [name for name in names if getattr(settings, name) is not None]
    if not given or any(draws_from_distribution(*drafter) for drafter in drafters):
        return
    readers = [name for name in DRAFTERS if draws_from_distribution(name, DrafterOptions())]
    names = ", ".join(repr(name_of(drafter)) for drafter, _ in drafters)
    raise InputError(
        f"expected {given[0]} with a drafter that draws from a distribution "
        f"({', '.join(readers)}, or ngram with ngram_probs=sampled), got it with {names}"
    )


def settings_read_by(
    drafter: str, options: DrafterOptions, settings: SamplingParams
) -> SamplingParams:
    """Returns the settings without those of drafts that a drafter of that name ignores."""
    if draws_from_distribution(drafter, options):
        return settings
    return settings.without_draft_sampling()

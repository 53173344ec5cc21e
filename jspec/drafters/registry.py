"""Drafters by name."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jspec.common.errors import InputError
from jspec.drafters.blockwise import BlockwiseDrafter, build_blockwise
from jspec.drafters.cascade import CascadeDrafter
from jspec.drafters.eagle import EagleDrafter, build_eagle
from jspec.drafters.heads.shipped import shipped_head
from jspec.drafters.hierarchical import HierarchicalDrafter, HierarchicalParams
from jspec.drafters.layer_skip import FirstLayersDrafter, LayerSubsetDrafter, build_layer_skip
from jspec.drafters.lookahead import LookaheadDrafter, build_lookahead
from jspec.drafters.medusa import MedusaDrafter, build_medusa
from jspec.drafters.model import ModelDrafter, build_model, make_model_drafter
from jspec.drafters.ngram import NgramDrafter, build_ngram
from jspec.drafters.pattern import PatternDrafter, build_pattern
from jspec.drafters.prompt_lookup import PromptLookupDrafter, build_prompt_lookup
from jspec.drafters.spec import (
    DEFAULT_NUM_DRAFT_TOKENS,
    BuiltDrafter,
    DrafterOptions,
    DrafterSpec,
    option_title,
)
from jspec.drafters.tables import TableDrafter, build_bigram, build_random, build_unigram
from jspec.speculation.types import Drafter


def _build_none(spec: DrafterSpec) -> BuiltDrafter:
    del spec
    return BuiltDrafter(None)


def _build_hierarchical(spec: DrafterSpec) -> BuiltDrafter:
    model, name = make_model_drafter(spec, "hierarchical"), _inner_name(spec.options)
    # The last draft of a round comes with the guesses before it.
    num_guesses = min(spec.options.inner_num_draft_tokens, max(spec.num_draft_tokens - 1, 1))
    inner = make_drafter(name, spec._replace(num_draft_tokens=num_guesses, is_member=True))
    assert inner.drafter is not None
    params = HierarchicalParams(spec.draft_params, inner.params)
    return BuiltDrafter(HierarchicalDrafter(model, inner.drafter), params)


def _inner_name(options: DrafterOptions) -> str:
    """Returns the name of what guesses under `hierarchical`."""
    name = options.inner_drafter
    if not set(_WITHOUT_MODEL).issuperset(name.split("+")):
        known = ", ".join(_WITHOUT_MODEL)
        raise InputError(f"expected an inner drafter without a model, among {known}; got {name!r}")
    return name


class _Registered(NamedTuple):
    """A drafter.

    Attributes:
      build: makes it.
      options: those of `DrafterOptions` that it reads.
    """

    build: Callable[[DrafterSpec], BuiltDrafter]
    options: tuple[str, ...] = ()


_REGISTRY: Mapping[str, _Registered] = {
    "none": _Registered(_build_none),
    "model": _Registered(build_model, ("draft_confidence",)),
    "prompt_lookup": _Registered(build_prompt_lookup, ("lookup_min_match", "lookup_growth")),
    "layer_skip": _Registered(build_layer_skip, ("draft_layers", "draft_confidence")),
    "eagle": _Registered(build_eagle, ("draft_head", "draft_confidence")),
    "medusa": _Registered(build_medusa, ("draft_head", "draft_confidence")),
    "blockwise": _Registered(build_blockwise, ("draft_head",)),
    "lookahead": _Registered(build_lookahead, ("draft_head", "draft_confidence")),
    "hierarchical": _Registered(
        _build_hierarchical, ("inner_drafter", "inner_num_draft_tokens", "draft_confidence")
    ),
    "pattern": _Registered(build_pattern, ("pattern", "json_skeleton")),
    "ngram": _Registered(
        build_ngram,
        ("ngram_min_order", "ngram_max_order", "ngram_window", "ngram_max_tokens", "ngram_probs"),
    ),
    "unigram": _Registered(build_unigram, ("draft_table", "draft_confidence")),
    "bigram": _Registered(build_bigram, ("draft_table", "draft_confidence")),
    "random": _Registered(build_random, ("draft_confidence",)),
}
DRAFTERS = tuple(_REGISTRY)
WITH_DRAFT_MODEL = ("model", "hierarchical")
_WITH_HEAD = tuple(name for name, one in _REGISTRY.items() if "draft_head" in one.options)
_WITHOUT_MODEL = ("prompt_lookup", "ngram", "unigram", "bigram", "random", "pattern")
_DEFAULTS = DrafterOptions()


def make_drafter(name: str, spec: DrafterSpec) -> BuiltDrafter:
    """Returns the drafter of that name; of several, joined by "+", a cascade in that order.

    Raises:
      InputError: no such drafter, one twice, or one that lacks something.
    """
    names = member_names(name)
    if len(names) == 1:
        return _REGISTRY[name].build(spec)
    spec = spec._replace(is_member=True, is_in_cascade=True)
    built = [_REGISTRY[member].build(spec) for member in names]
    drafters = tuple(one.drafter for one in built if one.drafter is not None)
    return BuiltDrafter(CascadeDrafter(drafters), tuple(one.params for one in built))


def member_names(name: str) -> list[str]:
    """Returns the drafters that a name stands for: one, or those of a cascade in their order.

    Raises:
      InputError: no such drafter, or a cascade with one of them twice, with two that are trained
        heads, with "none", or with an empty name.
    """
    names = name.split("+")
    if len(names) > 1 and "" in names:
        raise InputError(f"expected a drafter's name on both sides of every '+', got {name!r}")
    for member in names:
        if member not in DRAFTERS:
            where = "" if member == name else f" in {name!r}"
            raise InputError(
                f"expected a drafter among {', '.join(DRAFTERS)}, or several joined by '+'; "
                f"got {member!r}{where}"
            )
    if len(names) > 1 and "none" in names:
        raise InputError(f"expected 'none' alone, as it drafts nothing; got {name!r}")
    if len(set(names)) < len(names):
        raise InputError(f"expected each drafter of a cascade once, got {name!r}")
    if len(set(names).intersection(_WITH_HEAD)) > 1:
        raise InputError(
            f"expected at most one of {', '.join(_WITH_HEAD)} in a cascade, as draft_head is one "
            f"folder; got {name!r}"
        )
    return names


def needs_draft_model(name: str) -> bool:
    """Returns whether a drafter of that name drafts with a second model; see `member_names`."""
    return not set(WITH_DRAFT_MODEL).isdisjoint(member_names(name))


def options_read(name: str, options: DrafterOptions) -> set[str]:
    """Returns which of the options a drafter of that name reads, members and inner one included.

    Raises:
      InputError: see `member_names`; or an inner drafter that may not be one.
    """
    read: set[str] = set()
    for member in member_names(name):
        read.update(_REGISTRY[member].options)
        if member == "ngram" and options.ngram_probs == "sampled":
            read.add("draft_confidence")
        if member == "hierarchical":
            read |= options_read(_inner_name(options), options)
    return read


def draws_from_distribution(name: str, options: DrafterOptions) -> bool:
    """Returns whether a drafter of that name draws its drafts, at a temperature of its own.

    The drafts of the others follow from the context. Who draws is who reads `draft_confidence`.
    """
    return "draft_confidence" in options_read(name, options)


def check_options(names: Sequence[str], options: DrafterOptions) -> None:
    """Checks that each option which is not at its default is read by one of those drafters.

    Raises:
      InputError: one that none of them reads.
    """
    read = set[str]().union(*(options_read(name, options) for name in names))
    for field in dataclasses.fields(options):
        if field.name not in read and getattr(options, field.name) != field.default:
            readers = [name for name, one in _REGISTRY.items() if field.name in one.options]
            raise InputError(
                f"expected {option_title(field.name)} with a drafter that reads it "
                f"({', '.join(readers)}), got it with {', '.join(map(repr, names))}"
            )


def without_unread(name: str, options: DrafterOptions) -> DrafterOptions:
    """Returns the options with those at their defaults that a drafter of that name ignores."""
    read = options_read(name, options)
    return DrafterOptions(**{key: value for key, value in vars(options).items() if key in read})


def with_shipped_head(name: str, options: DrafterOptions, target: str) -> DrafterOptions:
    """Returns the options with the head that comes with jspec, where one is needed and not named.

    Args:
      name: the drafter's; see `member_names`.
      options: as they were given.
      target: what the target was asked for by.
    """
    heads = (shipped_head(member, target) for member in member_names(name))
    head = next(filter(None, heads), None)
    if head is None or options.draft_head is not None:
        return options
    return dataclasses.replace(options, draft_head=head)


def choose_drafter(
    name: str | None,
    *,
    has_draft: bool,
    target: str = "",
    options: DrafterOptions = _DEFAULTS,
) -> str:
    """Returns the drafter's name.

    Args:
      name: None takes "model" where there is a draft, else "prompt_lookup", and "+eagle" where a
        head for the target comes with jspec.
      has_draft: whether there is a draft model.
      target: what the target is asked for by.
      options: of the drafters.

    Raises:
      InputError: no such drafter, a draft model without a drafter that drafts with it, or the other
        way round, or an option that the drafter does not read.
    """
    if name is None:
        name = "model" if has_draft else "prompt_lookup"
        if not has_draft and shipped_head("eagle", target):
            name = "prompt_lookup+eagle"
    if needs_draft_model(name) and not has_draft:
        raise InputError(
            f"the drafter {name!r} expects a draft model (--draft=MODEL, in Python draft), got none"
        )
    if has_draft and not needs_draft_model(name):
        raise InputError(
            "a draft model (--draft, in Python draft) expects a drafter among "
            f"{', '.join(WITH_DRAFT_MODEL)}; got {name!r}"
        )
    check_options([name], options)
    return name


__all__ = [
    "DEFAULT_NUM_DRAFT_TOKENS",
    "DRAFTERS",
    "WITH_DRAFT_MODEL",
    "BlockwiseDrafter",
    "BuiltDrafter",
    "CascadeDrafter",
    "Drafter",
    "DrafterOptions",
    "DrafterSpec",
    "EagleDrafter",
    "FirstLayersDrafter",
    "HierarchicalDrafter",
    "HierarchicalParams",
    "LayerSubsetDrafter",
    "LookaheadDrafter",
    "MedusaDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "PatternDrafter",
    "PromptLookupDrafter",
    "TableDrafter",
    "check_options",
    "choose_drafter",
    "draws_from_distribution",
    "make_drafter",
    "member_names",
    "needs_draft_model",
    "options_read",
    "with_shipped_head",
    "without_unread",
]

"""Drafters by name."""

from collections.abc import Callable, Mapping

from jspec.drafters.cascade import CascadeDrafter
from jspec.drafters.eagle import EagleDrafter, build_eagle
from jspec.drafters.hierarchical import HierarchicalDrafter, HierarchicalParams
from jspec.drafters.layer_skip import FirstLayersDrafter, LayerSubsetDrafter, build_layer_skip
from jspec.drafters.model import ModelDrafter, build_model, make_model_drafter
from jspec.drafters.ngram import NgramDrafter, build_ngram
from jspec.drafters.pattern import PatternDrafter, build_pattern
from jspec.drafters.prompt_lookup import PromptLookupDrafter, build_prompt_lookup
from jspec.drafters.spec import BuiltDrafter, DrafterOptions, DrafterSpec
from jspec.drafters.tables import TableDrafter, build_bigram, build_random, build_unigram
from jspec.errors import InputError
from jspec.speculation.types import Drafter


def _build_none(spec: DrafterSpec) -> BuiltDrafter:
    del spec
    return BuiltDrafter(None)


def _build_hierarchical(spec: DrafterSpec) -> BuiltDrafter:
    model, name = make_model_drafter(spec, "hierarchical"), spec.options.inner_drafter
    if not set(_WITHOUT_MODEL).issuperset(name.split("+")):
        known = ", ".join(_WITHOUT_MODEL)
        raise InputError(f"expected an inner drafter without a model, among {known}; got {name!r}")
    # The last draft of a round comes with the guesses before it.
    num_guesses = min(spec.options.inner_num_draft_tokens, max(spec.num_draft_tokens - 1, 1))
    inner = make_drafter(name, spec._replace(num_draft_tokens=num_guesses, is_member=True))
    assert inner.drafter is not None
    params = HierarchicalParams(spec.draft_params, inner.params)
    return BuiltDrafter(HierarchicalDrafter(model, inner.drafter), params)


_BUILDERS: Mapping[str, Callable[[DrafterSpec], BuiltDrafter]] = {
    "none": _build_none,
    "model": build_model,
    "prompt_lookup": build_prompt_lookup,
    "layer_skip": build_layer_skip,
    "eagle": build_eagle,
    "hierarchical": _build_hierarchical,
    "pattern": build_pattern,
    "ngram": build_ngram,
    "unigram": build_unigram,
    "bigram": build_bigram,
    "random": build_random,
}
DRAFTERS = tuple(_BUILDERS)
WITH_DRAFT_MODEL = ("model", "hierarchical")
_WITHOUT_MODEL = ("prompt_lookup", "ngram", "unigram", "bigram", "random", "pattern")


def make_drafter(name: str, spec: DrafterSpec) -> BuiltDrafter:
    """Returns the drafter of that name; of several, joined by "+", a cascade in that order.

    Raises:
      InputError: no such drafter, one twice, or one that lacks something.
    """
    names = member_names(name)
    if len(names) == 1:
        return _BUILDERS[name](spec)
    built = [_BUILDERS[member](spec._replace(is_member=True)) for member in names]
    drafters = tuple(one.drafter for one in built if one.drafter is not None)
    return BuiltDrafter(CascadeDrafter(drafters), tuple(one.params for one in built))


def member_names(name: str) -> list[str]:
    """Returns the drafters that a name stands for: one, or those of a cascade in their order.

    Raises:
      InputError: no such drafter, or a cascade with one of them twice or with "none".
    """
    names = name.split("+")
    for member in names:
        if member not in DRAFTERS:
            raise InputError(
                f"expected a drafter among {', '.join(DRAFTERS)}, or several joined by '+'; "
                f"got {name!r}"
            )
    if len(set(names)) < len(names) or (len(names) > 1 and "none" in names):
        raise InputError(f"expected a cascade of different drafters, got {name!r}")
    return names


def needs_draft_model(name: str) -> bool:
    """Returns whether a drafter of that name drafts with a second model; see `member_names`."""
    return not set(WITH_DRAFT_MODEL).isdisjoint(member_names(name))


def choose_drafter(name: str | None, *, has_draft: bool) -> str:
    """Returns the drafter's name; None takes "model" where there is a draft, else "prompt_lookup".

    Raises:
      InputError: no such drafter, or a draft model without a drafter that drafts with it, or the
        other way round.
    """
    if name is None:
        return "model" if has_draft else "prompt_lookup"
    if has_draft != needs_draft_model(name):
        found = "a draft model" if has_draft else "none"
        raise InputError(
            f"a drafter among {', '.join(WITH_DRAFT_MODEL)}, and no other, expects a draft model; "
            f"got {found} and {name!r}"
        )
    return name


__all__ = [
    "DRAFTERS",
    "WITH_DRAFT_MODEL",
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
    "ModelDrafter",
    "NgramDrafter",
    "PatternDrafter",
    "PromptLookupDrafter",
    "TableDrafter",
    "choose_drafter",
    "make_drafter",
    "member_names",
    "needs_draft_model",
]

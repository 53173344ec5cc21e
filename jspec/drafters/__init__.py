"""Drafters by name."""

from collections.abc import Callable, Mapping
from typing import Any

from jspec.drafters.cascade import CascadeDrafter
from jspec.drafters.model import ModelDrafter
from jspec.drafters.ngram import NgramDrafter, build_ngram
from jspec.drafters.prompt_lookup import PromptLookupDrafter
from jspec.drafters.spec import BuiltDrafter, DrafterOptions, DrafterSpec
from jspec.drafters.tables import TableDrafter, build_bigram, build_random, build_unigram
from jspec.errors import InputError
from jspec.models import init_cache, make_apply
from jspec.speculation.types import Drafter


def _build_none(spec: DrafterSpec) -> BuiltDrafter:
    del spec
    return BuiltDrafter(None)


def _build_model(spec: DrafterSpec) -> BuiltDrafter:
    config = spec.draft_config
    if config is None:
        raise InputError("the drafter 'model' expects a draft model, and none was given")

    def empty_cache(batch_size: int, capacity: int) -> Any:
        return init_cache(config, batch_size=batch_size, capacity=capacity, dtype=spec.dtype)

    drafter = ModelDrafter(
        apply=make_apply(config),
        init_cache=empty_cache,
        num_draft_tokens=spec.num_draft_tokens,
        vocab_size=spec.vocab_size,
        target_vocab_size=spec.target_config.vocab_size,
        min_confidence=spec.options.draft_confidence,
    )
    return BuiltDrafter(drafter, spec.draft_params)


def _build_prompt_lookup(spec: DrafterSpec) -> BuiltDrafter:
    options = spec.options
    drafter = PromptLookupDrafter(
        spec.num_draft_tokens, min_match=options.lookup_min_match, growth=options.lookup_growth
    )
    return BuiltDrafter(drafter)


_BUILDERS: Mapping[str, Callable[[DrafterSpec], BuiltDrafter]] = {
    "none": _build_none,
    "model": _build_model,
    "prompt_lookup": _build_prompt_lookup,
    "ngram": build_ngram,
    "unigram": build_unigram,
    "bigram": build_bigram,
    "random": build_random,
}
DRAFTERS = tuple(_BUILDERS)
_WITH_DRAFT_MODEL = {"model"}


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
    return not _WITH_DRAFT_MODEL.isdisjoint(member_names(name))


__all__ = [
    "DRAFTERS",
    "BuiltDrafter",
    "CascadeDrafter",
    "Drafter",
    "DrafterOptions",
    "DrafterSpec",
    "ModelDrafter",
    "NgramDrafter",
    "PromptLookupDrafter",
    "TableDrafter",
    "make_drafter",
    "member_names",
    "needs_draft_model",
]

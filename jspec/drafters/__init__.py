"""Drafters by name."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jspec.drafters.model import ModelDrafter
from jspec.drafters.prompt_lookup import PromptLookupDrafter
from jspec.errors import InputError
from jspec.models import LlamaConfig, init_cache, make_apply
from jspec.speculation.types import Drafter


class DrafterSpec(NamedTuple):
    """What a drafter may be built from.

    Attributes:
      num_draft_tokens: drafts a round.
      target_config: the target's shape.
      vocab_size: ids that are really used, shared by target and draft.
      draft_config: the draft model's shape; None without a draft model.
      dtype: of the draft model's cache.
    """

    num_draft_tokens: int
    target_config: LlamaConfig
    vocab_size: int
    draft_config: LlamaConfig | None
    dtype: Any


def _build_model(spec: DrafterSpec) -> Drafter:
    config = spec.draft_config
    if config is None:
        raise InputError("the drafter 'model' expects a draft model, and none was given")

    def empty_cache(batch_size: int, capacity: int) -> Any:
        return init_cache(config, batch_size=batch_size, capacity=capacity, dtype=spec.dtype)

    return ModelDrafter(
        apply=make_apply(config),
        init_cache=empty_cache,
        num_draft_tokens=spec.num_draft_tokens,
        vocab_size=spec.vocab_size,
        target_vocab_size=spec.target_config.vocab_size,
    )


def _build_prompt_lookup(spec: DrafterSpec) -> Drafter:
    return PromptLookupDrafter(spec.num_draft_tokens)


_BUILDERS: Mapping[str, Callable[[DrafterSpec], Drafter | None]] = {
    "none": lambda spec: None,
    "model": _build_model,
    "prompt_lookup": _build_prompt_lookup,
}
DRAFTERS = tuple(_BUILDERS)


def make_drafter(name: str, spec: DrafterSpec) -> Drafter | None:
    """Returns the drafter of that name; None for "none", which is plain decoding.

    Raises:
      InputError: no such drafter, or it lacks something.
    """
    if name not in _BUILDERS:
        raise InputError(f"expected a drafter among {', '.join(DRAFTERS)}; got {name!r}")
    return _BUILDERS[name](spec)


__all__ = [
    "DRAFTERS",
    "Drafter",
    "DrafterSpec",
    "ModelDrafter",
    "PromptLookupDrafter",
    "make_drafter",
]

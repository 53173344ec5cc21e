"""What a drafter is built from: the models, the user's options and the heads that jspec ships."""

from jspec.drafters import (
    DrafterEntry,
    DrafterOptions,
    DrafterSpec,
    entries_of,
    with_shipped_head,
)
from jspec.weights.resolver import LoadedModel
from jspec.weights.vocabulary import have_same_tokenizer, shared_vocab_size, used_vocab_size


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
    other = None
    drafting = [entry for entry in entries_of(drafter) if entry.needs == "draft"]
    if draft is not None and all(entry.takes_any_tokenizer for entry in drafting):
        other = None if have_same_tokenizer(target, draft) else draft.tokenizer
    return DrafterSpec(
        num_draft_tokens=num_draft_tokens,
        target_config=target.own_config,
        vocab_size=used_vocab_size(target) if other else shared_vocab_size(target, draft),
        draft_config=None if draft is None else draft.own_config,
        dtype=target.params["embedding"].dtype,
        draft_params=None if draft is None else draft.params,
        options=with_shipped_head(drafter, options, target.name),
        tokenizer=target.tokenizer,
        draft_tokenizer=other,
    )

"""What a drafter is built from: the models, the user's options and the heads that jspec ships."""

from jspec.drafters import DrafterEntry, DrafterOptions, DrafterSpec, with_shipped_head
from jspec.weights.resolver import LoadedModel
from jspec.weights.vocabulary import shared_vocab_size


def make_spec(
    target: LoadedModel,
    draft: LoadedModel | None,
    drafter: str | DrafterEntry,
    options: DrafterOptions,
    num_draft_tokens: int,
) -> DrafterSpec:
    """Returns what a drafter is built from; a head that jspec ships need not be in the options."""
    return DrafterSpec(
        num_draft_tokens=num_draft_tokens,
        target_config=target.own_config,
        vocab_size=shared_vocab_size(target, draft),
        draft_config=None if draft is None else draft.own_config,
        dtype=target.params["embedding"].dtype,
        draft_params=None if draft is None else draft.params,
        options=with_shipped_head(drafter, options, target.name),
        tokenizer=target.tokenizer,
    )

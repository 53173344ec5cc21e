"""The ids that a vocabulary really uses, without the padding behind them.

Models of one family pad their embeddings to different sizes. The rows behind the tokenizer's ids
were never trained: they are masked in the target, plain decoding included, and cut off the draft.
"""

from typing import Any

import jax.numpy as jnp

from jspec.common.errors import InputError
from jspec.common.typing import ApplyFn
from jspec.weights.resolver import LoadedModel
from jspec.weights.tokenizers.tokenizer import check_same_tokenizer


def used_vocab_size(model: LoadedModel) -> int:
    """Returns how many ids of the model its tokenizer knows; all of them for random weights."""
    if model.is_random:
        return model.config.vocab_size
    return min(model.tokenizer.vocab_size, model.config.vocab_size)


def shared_vocab_size(target: LoadedModel, draft: LoadedModel | None) -> int:
    """Returns how many ids draft and target share; the target's own without a draft.

    Raises:
      InputError: draft and target mean different things by one id.
    """
    if draft is None:
        return used_vocab_size(target)
    if target.is_random or draft.is_random:
        # Random weights have no tokenizer of their own: only the size can be wrong.
        if target.config.vocab_size != draft.config.vocab_size:
            raise InputError(
                f"expected draft and target of one vocabulary, got {draft.config.vocab_size} ids "
                f"({draft.name}) and {target.config.vocab_size} ({target.name})"
            )
    else:
        check_same_tokenizer(target.tokenizer, draft.tokenizer)
    return min(used_vocab_size(target), used_vocab_size(draft))


def mask_padding(apply: ApplyFn, model: LoadedModel) -> ApplyFn:
    """Returns the model with the logits of padding at minus infinity, so that none is drawn."""
    size = used_vocab_size(model)
    if size == model.config.vocab_size:
        return apply

    def masked(*args: Any, **options: Any) -> Any:
        logits, hidden, cache = apply(*args, **options)
        is_used = jnp.arange(logits.shape[-1]) < size
        return jnp.where(is_used, logits, -jnp.inf), hidden, cache

    return masked

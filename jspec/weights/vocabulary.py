"""Which ids a model really uses, and whether draft and target mean the same by them.

Models of one family pad their embeddings to different sizes. The rows beyond the tokenizer's ids
were never trained: they are masked in the target, plain decoding included, and cut off the draft.
"""

import hashlib
import json
import re
from typing import Any

import jax.numpy as jnp

from jspec.common.errors import InputError
from jspec.common.typing import ApplyFn
from jspec.kernels import own_part, own_part_of, with_own_part
from jspec.weights.resolver import LoadedModel
from jspec.weights.tokenizers.tokenizer import ByteTokenizer, TokenizerLike

# The names that converters give to rows that stand for no token.
_PADDING = re.compile(r"\[PAD\d*\]|<pad_?\d*>|<\|?dummy_?\d*\|?>", re.IGNORECASE)


def _meanings(tokenizer: TokenizerLike) -> dict[int, str]:
    """Returns the token of each id, padding left out."""
    tokens = tokenizer.vocabulary().items()
    return {token_id: token for token, token_id in tokens if not _PADDING.fullmatch(token)}


def vocabulary_digest(tokenizer: TokenizerLike) -> str | None:
    """Returns a checksum of what each id means, padding left out.

    The byte tokenizer gives None: it is a stand-in, whose ids mean nothing to the model.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return None
    return hashlib.sha256(json.dumps(sorted(_meanings(tokenizer).items())).encode()).hexdigest()


def check_same_tokenizer(target: TokenizerLike, draft: TokenizerLike) -> None:
    """Checks that a draft model's ids mean what the target's mean.

    Tokens beyond the shorter vocabulary are accepted if they are only padding.

    Raises:
      InputError: names the first id that differs.
    """
    target_ids, draft_ids = _meanings(target), _meanings(draft)
    if differing := dict(target_ids.items() ^ draft_ids.items()):
        first = min(differing)
        here, there = (
            repr(ids[first]) if first in ids else "no token" for ids in (target_ids, draft_ids)
        )
        raise InputError(
            f"target and draft have different tokenizers: id {first} is {here} in the target and "
            f"{there} in the draft"
        )


def have_same_tokenizer(target: LoadedModel, draft: LoadedModel) -> bool:
    """Returns whether a draft's ids mean what the target's mean; see `check_same_tokenizer`.

    Random weights come without a tokenizer, so they match any.
    """
    if target.is_random or draft.is_random:
        return True
    return _meanings(target.tokenizer) == _meanings(draft.tokenizer)


def used_vocab_size(model: LoadedModel) -> int:
    """Returns how many ids of the model its tokenizer knows; all of them for random weights."""
    if model.is_random:
        return model.config.vocab_size
    return min(model.tokenizer.vocab_size, model.config.vocab_size)


def shared_vocab_size(target: LoadedModel, draft: LoadedModel | None) -> int:
    """Returns how many ids draft and target share; the target's own number without a draft.

    Raises:
      InputError: an id means different things to draft and target.
    """
    if draft is None:
        return used_vocab_size(target)
    if target.is_random or draft.is_random:
        # Random weights come without a tokenizer, so only the size can be wrong.
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
        is_used = own_part_of(jnp.arange(logits.shape[-1]) < size, logits)
        part = jnp.where(is_used, own_part(logits), -jnp.inf)
        return with_own_part(logits, part), hidden, cache

    return masked

"""What a round emits, and where a row ends: at a stop token or the length limit, inside a block as
in plain decoding.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jspec.common.typing import DraftTokens, RowCounts, RowFlags
from jspec.speculation.acceptance.types import Verdict
from jspec.speculation.types import SpecState


def emitted_tokens(drafts: DraftTokens, verdict: Verdict) -> Int32[Array, "b w+1"]:
    """Returns the accepted drafts of [b w] and then the next token; the rest means nothing."""
    index = jnp.arange(drafts.shape[1] + 1)
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    is_next = index == verdict.num_accepted[:, None]
    return jnp.where(is_next, verdict.next_token[:, None], padded)


def cut_at_end(
    state: SpecState, tokens: Int32[Array, "b t"], num_tokens: RowCounts
) -> tuple[RowCounts, RowFlags]:
    """Returns how many of a round's tokens each row emits, and whether it is done then.

    `num_tokens` says how many of the tokens the round would emit. The state is that before it.
    """
    index = jnp.arange(tokens.shape[1])
    is_stop = (tokens[:, :, None] == state.stop_ids[:, None, :]).any(axis=-1)
    is_stop |= tokens < 0  # NO_TOKEN: there was no distribution to draw from, so the row must end
    is_stop &= index < num_tokens[:, None]
    first_stop = jnp.min(jnp.where(is_stop, index, tokens.shape[1]), axis=1)
    num_tokens = jnp.minimum(num_tokens, first_stop + 1)  # the stop token itself is emitted
    # Done rows take part in every call of the batch, but emit and commit nothing.
    num_tokens = jnp.where(state.is_done, 0, num_tokens)
    # No limit on `num_tokens` is needed for the length: no more drafts were asked for than fit.
    length = state.target_cache.length + 1 + num_tokens
    return num_tokens, state.is_done | is_stop.any(axis=1) | (length >= state.max_length)


def silence(state: SpecState, is_done: RowFlags) -> SpecState:
    """Marks rows as done, and makes them greedy: noise is drawn only while a row needs it."""
    return state.replace(
        settings=state.settings.replace(
            temperature=jnp.where(is_done, 0.0, state.settings.temperature)
        ),
        draft_temperature=jnp.where(is_done, 0.0, state.draft_temperature),
        is_done=is_done,
    )

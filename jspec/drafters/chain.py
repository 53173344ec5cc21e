"""Drawing drafts one after another, each from a distribution of its own.

A row stops where it has as many as are wanted of it, where there is no distribution (all logits
-inf: a table without an entry, or with only tokens that the processors forbid), or where its
distribution's most likely token is less likely than `min_confidence` (see `sampling.confidence`):
the distribution is looked at *before* it is drawn from. (To take back a token that was drawn
because it looks unlikely would bias the output.)
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32, Key

from jspec.common.typing import DraftProbs, DraftTokens, RowCounts, RowFlags, RowTokens
from jspec.drafters.draw import DrawFn, Drawing, draw_from_distribution, draw_one
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.acceptance.types import Proposal

LogitsFn = Callable[[Any, RowTokens], tuple[Float32[Array, "b v"], Any]]


class _Drafting(struct.PyTreeNode):
    """A chain in the making.

    Attributes:
      memory: what the next distribution follows from, besides the token.
      token: the newest, [b].
      settings: at its position.
      count: calls made so far.
      tokens: drawn so far, [b w].
      probs: their distributions, [b w v].
      num_tokens: of each row's that are meant, [b].
      is_going: rows that want more, [b].
    """

    memory: Any
    token: RowTokens
    settings: SamplingSettings
    count: Int32[Array, ""]
    tokens: DraftTokens
    probs: DraftProbs
    num_tokens: RowCounts
    is_going: RowFlags


def draw_chain(
    first: LogitsFn,
    later: LogitsFn,
    memory: Any,
    last_token: RowTokens,
    *,
    limit: RowCounts,
    rng_keys: Key[Array, "b w"],
    settings: SamplingSettings,
    vocab_size: int,
    ids: Int32[Array, "u"] | None = None,
    min_confidence: float = 0.0,
    draw: DrawFn = draw_from_distribution,
) -> tuple[Proposal, Any, Int32[Array, ""]]:
    """Draws a chain of drafts in loops that stop when no row wants more.

    Args:
      first: (memory, last token [b]) -> the logits of the first draft [b u], and the memory.
      later: likewise for every other draft.
      memory: a pytree, such as a cache.
      last_token: what the chain follows, [b].
      limit: drafts wanted of each row, [b]; where it is 0 for all, no call is made.
      rng_keys: one for each draft; consumed.
      settings: how to draw; the processors have seen `last_token`.
      vocab_size: of the distributions, v >= u.
      ids: of the tokens that the logits are of, rising; None for 0 to u-1. The others have
        probability 0.
      min_confidence: see the module.
      draw: draws a token and returns the distribution it was drawn from.

    Returns:
      The proposal; the memory; how many calls were made, which fed the last token and then drafts.
    """
    batch_size, width = rng_keys.shape
    drawing = Drawing(vocab_size, ids, min_confidence, draw)
    drafting = _Drafting(
        memory,
        last_token,
        settings,
        count=jnp.int32(0),
        tokens=jnp.zeros([batch_size, width], jnp.int32),
        # Zeros stand for drafts that are not put forward; verification ignores their slots.
        probs=jnp.zeros([batch_size, width, vocab_size], jnp.float32),
        num_tokens=jnp.zeros([batch_size], jnp.int32),
        # With no row going, neither loop below makes a trip and no model is called.
        is_going=limit > 0,
    )

    def grow(call: LogitsFn, drafting: _Drafting) -> _Drafting:
        logits, memory = call(drafting.memory, drafting.token)
        index = drafting.count
        drawn = draw_one(
            drawing,
            logits,
            drafting.settings,
            rng_keys,
            index,
            drafting.is_going,
            drafting.probs,
        )
        num_tokens = drafting.num_tokens + drawn.is_meant.astype(jnp.int32)
        # NO_TOKEN is negative: a row that has stopped still needs an id that can be looked up.
        token = jnp.maximum(drawn.token, 0)
        return drafting.replace(
            memory=memory,
            token=token,
            # Penalties and the like see the drafts before the next one.
            settings=drafting.settings.after(token),
            count=index + 1,
            tokens=drafting.tokens.at[:, index].set(token),
            probs=drawn.probs,
            num_tokens=num_tokens,
            # A row stops for good: drafts after a gap would have no meaning.
            is_going=drawn.is_meant & (num_tokens < limit),
        )

    def is_first(drafting: _Drafting) -> Bool[Array, ""]:
        # The count makes this loop end after one trip.
        return drafting.is_going.any() & (drafting.count == 0)

    def is_wanted(drafting: _Drafting) -> Bool[Array, ""]:
        return drafting.is_going.any()

    # Loops of no trips leave the memory where it is; a `lax.cond` would copy a cache.
    if first is not later:
        drafting = jax.lax.while_loop(is_first, lambda now: grow(first, now), drafting)
    drafting = jax.lax.while_loop(is_wanted, lambda now: grow(later, now), drafting)
    proposal = Proposal(drafting.tokens, drafting.num_tokens, drafting.probs)
    return proposal, drafting.memory, drafting.count

"""The target's most likely tokens after each token of a block, for drafters that learn from them.

A drafter asks for them by an attribute `num_runners_up`, how many it wants after each token, and
takes them in a method

    observe_runners_up(state, tokens [b t], runners_up [b t k], is_fed [b t], valid [b t]) -> state

which is called after `observe`, for the block of each verify call: of rejected drafts, too, as what
the target would say after them is as good a lesson. Prefill, which computes logits at the prompt's
last token alone, shows nothing. For any other drafter nothing is computed.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jspec.common.typing import BlockFlags, Logits, RowCounts, Tokens
from jspec.sampling.distribution import best_token
from jspec.speculation.types import Drafter


def num_runners_up(drafter: Drafter | None) -> int:
    """Returns how many of the target's most likely tokens a drafter observes after each token."""
    return getattr(drafter, "num_runners_up", 0)


def show_runners_up(
    drafter: Any,
    state: Any,
    block: Tokens,
    logits: Logits,
    num_drafts: RowCounts,
    valid: BlockFlags,
) -> Any:
    """Returns the drafter's state after it has seen them, if it asks for them.

    Args:
      drafter: any.
      state: its state.
      block: the newest token and the drafts, padding included.
      logits: of the target after each, processed.
      num_drafts: drafts that are none of the padding, [b].
      valid: the block's tokens that were committed; none of a row that is done.
    """
    count = num_runners_up(drafter)
    if count == 0:
        return state
    # What follows padding depends on the other rows, whose drafts make the block as wide as it is.
    is_fed = (jnp.arange(block.shape[1]) <= num_drafts[:, None]) & valid[:, :1]
    return drafter.observe_runners_up(state, block, runners_up(logits, count), is_fed, valid)


def runners_up(logits: Logits, count: int) -> Int32[Array, "b t k"]:
    """Returns the `count` most likely tokens, the likeliest first; `NO_TOKEN` where no more are."""
    ids, found = jnp.arange(logits.shape[-1], dtype=jnp.int32), []
    for _ in range(count):
        found.append(best_token(logits))
        logits = jnp.where(ids == found[-1][..., None], -jnp.inf, logits)
    return jnp.stack(found, axis=-1)

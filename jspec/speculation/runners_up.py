"""The target's most likely tokens after each token of a block, for drafters that learn from them.

A drafter asks for them by an attribute `num_runners_up`, how many it wants after each token, and
takes them in a method

    observe_runners_up(state, tokens [b t], runners_up [b t k], is_fed [b t], is_kept [b t])

which returns the new state. It is called before `observe`, with the block of each verify call: the
newest token and the drafts, a chain or a tree. What the target would say after a rejected draft is
as good a lesson as what it says after one that is kept. `is_fed` leaves out padding, and rows that
are done. Prefill, which computes logits at the prompt's last token alone, shows nothing. For any
other drafter nothing is computed.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jspec.common.typing import BlockFlags, Logits, Tokens
from jspec.sampling.distribution import best_token
from jspec.speculation.acceptance.types import Proposal, Verdict
from jspec.speculation.types import Drafter, SpecState


def num_runners_up(drafter: Drafter | None) -> int:
    """Returns how many of the target's most likely tokens a drafter observes after each token."""
    return getattr(drafter, "num_runners_up", 0)


def learn(
    drafter: Drafter,
    state: SpecState,
    block: Tokens,
    logits: Logits,
    proposal: Proposal,
    verdict: Verdict,
) -> SpecState:
    """Returns the state after the drafter has seen what the target found likeliest, if it asks.

    `logits` are those after each token of the block, processed.
    """
    if num_runners_up(drafter) == 0:
        return state
    slots = jnp.arange(block.shape[1])
    # What follows padding depends on the other rows, whose drafts make the block as wide as it is.
    is_fed = (slots <= proposal.num_tokens[:, None]) & ~state.is_done[:, None]
    is_kept = slots <= verdict.num_accepted[:, None]
    if verdict.path is not None:
        rows = jnp.arange(len(block))[:, None]
        is_kept = is_kept[:, : verdict.path.shape[1]]
        is_kept = jnp.zeros_like(is_fed).at[rows, verdict.path].max(is_kept)
    draft = show_runners_up(drafter, state.draft, block, logits, is_fed, is_fed & is_kept)
    return state.replace(draft=draft)


def show_runners_up(
    drafter: Any, state: Any, block: Tokens, logits: Logits, is_fed: BlockFlags, is_kept: BlockFlags
) -> Any:
    """Returns a drafter's own state after it has seen the runners-up in a block, if it asks."""
    count = num_runners_up(drafter)
    if count == 0:
        return state
    return drafter.observe_runners_up(state, block, runners_up(logits, count), is_fed, is_kept)


def runners_up(logits: Logits, count: int) -> Int32[Array, "b t k"]:
    """Returns the `count` most likely tokens, the likeliest first; `NO_TOKEN` where no more are."""
    ids, found = jnp.arange(logits.shape[-1], dtype=jnp.int32), []
    for _ in range(count):
        found.append(best_token(logits))
        logits = jnp.where(ids == found[-1][..., None], -jnp.inf, logits)
    return jnp.stack(found, axis=-1)

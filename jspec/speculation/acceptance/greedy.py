"""Greedy match: keep drafts while each is the target's most likely token.

Exact at temperature 0, where the target's distribution has all probability on that token, and
nowhere else. It is `rejection` with nothing left to chance.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float32

from jspec.common.typing import RowCounts, TargetProbs
from jspec.sampling.distribution import best_token
from jspec.speculation.acceptance import siblings
from jspec.speculation.acceptance.chain import probs_after, probs_of_drafts, rule_without_chance
from jspec.speculation.types import Proposal, Temperatures


def acceptance_probs(target_probs: TargetProbs, proposal: Proposal) -> Float32[Array, "b w"]:
    """Returns 1 where a draft is the target's most likely token, and 0 elsewhere, [b w]."""
    best = best_token(target_probs[:, : proposal.width])
    # A tie for the most likely token is broken as plain decoding breaks it: the first one wins.
    is_possible = probs_of_drafts(target_probs, proposal) > 0
    return ((best == proposal.tokens) & is_possible).astype(jnp.float32)


def next_token_probs(
    target_probs: TargetProbs, proposal: Proposal, num_accepted: RowCounts
) -> Float32[Array, "b v"]:
    """Returns the one-hot distribution of the most likely token after `num_accepted` [b] drafts.

    Where the target has no distribution, NaN or all zeros, neither has the next token: zeros.
    """
    del proposal
    probs = probs_after(target_probs, num_accepted)
    best = best_token(probs)
    is_best = (jnp.arange(probs.shape[-1]) == best[:, None]) & (probs > 0)
    return is_best.astype(jnp.float32)


# At temperature 0 the target's distribution is one-hot, and there all lossless rules are the same.
RULE = rule_without_chance(
    acceptance_probs,
    next_token_probs,
    temperatures=Temperatures.ZERO,
    matches_at_zero=True,
    tree=siblings.RULE,
)

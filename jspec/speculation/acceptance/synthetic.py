"""Acceptance at a given rate, whatever the models say: to measure speed, and nothing else.

The text means nothing. Each draft is kept with the same probability, the alpha of Theorem 3.8
(Leviathan et al., arXiv 2211.17192), so that the time of real rounds can be set against acceptance
with models whose trained weights are not at hand.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float32

from jspec.errors import check_range
from jspec.sampling import sample
from jspec.speculation.acceptance.chain import count_accepted, probs_after, uniforms_of
from jspec.speculation.noise import INDEPENDENT
from jspec.speculation.types import AcceptanceNoise, AcceptanceRule, Proposal, Temperatures, Verdict
from jspec.typing import RowCounts, TargetProbs


def acceptance_probs(
    target_probs: TargetProbs, proposal: Proposal, *, rate: float
) -> Float32[Array, "b w"]:
    """Returns the rate at each draft of [b w]."""
    del target_probs
    return jnp.full(proposal.tokens.shape, rate, jnp.float32)


def next_token_probs(
    target_probs: TargetProbs, proposal: Proposal, num_accepted: RowCounts
) -> Float32[Array, "b v"]:
    """Returns the target's law after `num_accepted` [b] drafts."""
    del proposal
    return probs_after(target_probs, num_accepted)


def accept(
    target_probs: TargetProbs, proposal: Proposal, noise: AcceptanceNoise, *, rate: float
) -> Verdict:
    """Keeps each draft if its uniform is below the rate, up to the first that is not.

    Args:
      target_probs: the target's law at each block token, [b w+1 v].
      proposal: the drafts.
      noise: uniforms [b w] for the drafts, Gumbel noise [b v] for the next token.
      rate: from 0 to 1.
    """
    num_accepted = count_accepted(uniforms_of(noise) < rate, proposal)
    law = next_token_probs(target_probs, proposal, num_accepted)
    return Verdict(num_accepted, sample(law, noise.gumbel))


@functools.cache  # a compiled program is found again by the rule it was compiled for
def make_rule(rate: float) -> AcceptanceRule:
    """Returns the rule; at temperature 0 there is no noise that it could draw from.

    Raises:
      InputError: `rate` is not from 0 to 1.
    """
    check_range("synthetic_rate", rate, 0.0, 1.0)
    return AcceptanceRule(
        functools.partial(acceptance_probs, rate=rate),
        next_token_probs,
        functools.partial(accept, rate=rate),
        INDEPENDENT,
        temperatures=Temperatures.POSITIVE,
        is_lossless=False,
    )

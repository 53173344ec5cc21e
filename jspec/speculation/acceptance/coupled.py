"""Coupled sampling (Daliri et al., arXiv 2408.07978): draft and target share their noise.

At every absolute position the target's token is the one that plain decoding draws there, from the
same Gumbel noise. The drafter draws from its own distribution with that noise too, and so often
agrees; its tokens are kept as long as they agree. What is emitted is plain decoding's text itself,
token for token, whatever the drafter and the number of drafts. Draft and target agree with
probability at least (1 - TV) / (1 + TV), TV being the total variation between their distributions.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float32

from jspec.common.typing import RowCounts, TargetProbs
from jspec.sampling.distribution import sample
from jspec.sampling.noise import SHARED, AcceptanceNoise
from jspec.speculation.acceptance.chain import count_accepted, probs_after, probs_of_drafts
from jspec.speculation.acceptance.types import AcceptanceRule, Proposal, Verdict


def acceptance_probs(target_probs: TargetProbs, proposal: Proposal) -> Float32[Array, "b w"]:
    """Returns [b w], the target's probability of each draft.

    That is the probability of keeping a draft that was made without a look at the noise, such as a
    looked-up one; a drafter that shares the noise is kept at least as often on average.
    """
    return probs_of_drafts(target_probs, proposal)


def next_token_probs(
    target_probs: TargetProbs, proposal: Proposal, num_accepted: RowCounts
) -> Float32[Array, "b v"]:
    """Returns the target's distribution after `num_accepted` [b] drafts; the noise picks from
    it.
    """
    del proposal
    return probs_after(target_probs, num_accepted)


def accept(target_probs: TargetProbs, proposal: Proposal, noise: AcceptanceNoise) -> Verdict:
    """Applies the rule: keep drafts while they are what the target itself draws.

    Args:
      target_probs: the target's distribution at each block token, [b w+1 v].
      proposal: the drafts.
      noise: Gumbel noise [b w+1 v] of each position.
    """
    tokens = sample(target_probs, noise.gumbel)
    num_accepted = count_accepted(tokens[:, : proposal.width] == proposal.tokens, proposal)
    return Verdict(num_accepted, jnp.take_along_axis(tokens, num_accepted[:, None], axis=1)[:, 0])


RULE = AcceptanceRule(acceptance_probs, next_token_probs, accept, SHARED)

"""Speculative sampling (Leviathan et al., arXiv 2211.17192, algorithm 1).

Keep a draft x with probability min(1, target(x) / draft(x)). At the first refusal draw from the
residual, norm(max(target - draft, 0)); after the last draft draw from the target. The emitted
tokens then follow the target's distribution exactly, whatever distribution the drafts were drawn
from.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float32

from jspec.common.typing import RowCounts, TargetProbs
from jspec.sampling.distribution import sample
from jspec.sampling.noise import INDEPENDENT, AcceptanceNoise
from jspec.speculation.acceptance.chain import (
    count_accepted,
    draft_distribution_after,
    draft_probs_of_drafts,
    min_ratio,
    normalised_or,
    probs_after,
    probs_of_drafts,
    uniforms_of,
)
from jspec.speculation.acceptance.types import AcceptanceRule, Proposal, Verdict


def acceptance_probs(target_probs: TargetProbs, proposal: Proposal) -> Float32[Array, "b w"]:
    """Returns min(1, target / draft) at each draft.

    Args:
      target_probs: the target's distribution at each block token, [b w+1 v].
      proposal: the drafts.
    """
    return min_ratio(probs_of_drafts(target_probs, proposal), draft_probs_of_drafts(proposal))


def next_token_probs(
    target_probs: TargetProbs, proposal: Proposal, num_accepted: RowCounts
) -> Float32[Array, "b v"]:
    """Returns the residual distribution, or the target's own after the last draft.

    Where rounding leaves no residual at all, draft and target agree: the target's distribution
    stands in.

    Args:
      target_probs: the target's distribution at each block token, [b w+1 v].
      proposal: the drafts.
      num_accepted: drafts kept, [b].
    """
    target = probs_after(target_probs, num_accepted)
    draft = draft_distribution_after(proposal, num_accepted, target.shape[1])
    return normalised_or(jnp.maximum(target - draft, 0.0), target)


def accept(target_probs: TargetProbs, proposal: Proposal, noise: AcceptanceNoise) -> Verdict:
    """Applies the rule.

    A draft is kept if u · draft < target, strictly and without a division: a draft that the target
    gives probability 0 is refused even at u = 0.

    Args:
      target_probs: the target's distribution at each block token, [b w+1 v].
      proposal: the drafts.
      noise: uniforms [b w] for the drafts, Gumbel noise [b v] for the next token.
    """
    threshold = uniforms_of(noise) * draft_probs_of_drafts(proposal)
    num_accepted = count_accepted(threshold < probs_of_drafts(target_probs, proposal), proposal)
    distribution = next_token_probs(target_probs, proposal, num_accepted)
    return Verdict(num_accepted, sample(distribution, noise.gumbel))


RULE = AcceptanceRule(acceptance_probs, next_token_probs, accept, INDEPENDENT)

"""Speculative sampling (Leviathan et al., arXiv 2211.17192, algorithm 1; also arXiv 2302.01318).

Accept a draft x with probability min(1, target(x) / draft(x)). After the first rejection draw from
the residual distribution, norm(max(target - draft, 0)); after the last draft draw from the target.

Why it is exact: x is drafted and accepted with probability draft(x) · min(1, target(x) / draft(x))
= min(draft(x), target(x)). All drafts together are rejected with probability 1 - sum of
min(draft, target), which is the sum of max(target - draft, 0), the residual's normaliser. So the
residual token adds exactly max(target(x) - draft(x), 0), and the two sum to target(x), whatever
the draft's distribution was.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float32

from jspec.common.typing import RowCounts, TargetProbs
from jspec.sampling.distribution import sample
from jspec.sampling.noise import INDEPENDENT, AcceptanceNoise
from jspec.speculation.acceptance import chain, siblings
from jspec.speculation.types import AcceptanceRule, Proposal, Verdict


def acceptance_probs(
    target_probs: TargetProbs, proposal: Proposal, *, lenience: float = 1.0
) -> Float32[Array, "b w"]:
    """Returns min(1, target / draft) at each draft; with `lenience` as if draft were lower."""
    draft = lenience * chain.draft_probs_of_drafts(proposal)
    return chain.min_ratio(chain.probs_of_drafts(target_probs, proposal), draft)


def next_token_probs(
    target_probs: TargetProbs, proposal: Proposal, num_accepted: RowCounts
) -> Float32[Array, "b v"]:
    """Returns the residual distribution, or the target's own after the last draft."""
    target = chain.probs_after(target_probs, num_accepted)
    draft = chain.draft_distribution_after(proposal, num_accepted, target.shape[1])
    # Rounding may leave no residual at all. Then draft and target agree, and the target will do.
    return chain.normalised_or(jnp.maximum(target - draft, 0.0), target)


def accept(
    target_probs: TargetProbs, proposal: Proposal, noise: AcceptanceNoise, *, lenience: float = 1.0
) -> Verdict:
    """Applies the rule; uniforms [b w] decide the drafts, Gumbel noise [b v] the next token."""
    # u · draft < target is u < target / draft without the division. Strictly: a draft that the
    # target gives probability 0 is rejected even at u = 0.
    threshold = chain.uniforms_of(noise) * (lenience * chain.draft_probs_of_drafts(proposal))
    num_accepted = chain.count_accepted(
        threshold < chain.probs_of_drafts(target_probs, proposal), proposal
    )
    distribution = next_token_probs(target_probs, proposal, num_accepted)
    return Verdict(num_accepted, sample(distribution, noise.gumbel))


RULE = AcceptanceRule(
    acceptance_probs,
    next_token_probs,
    accept,
    INDEPENDENT,
    matches_at_zero=True,
    tree=siblings.RULE,
)

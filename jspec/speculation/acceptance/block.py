"""Block verification (Sun et al., arXiv 2403.10444, algorithm 2).

The drafts are judged together and not one at a time. With p_0 = 1 and p_i = min(1, p_(i-1) ·
target(x_i) / draft(x_i)), a prefix of i drafts is good enough with probability

  h_i = S_i / (S_i + 1 - p_i),  S_i = sum over x of max(p_i · target(x) - draft(x), 0),

where the distributions are those after the prefix; for a row's last draft h_n = p_n. The longest
good prefix is accepted, whatever became of the shorter ones. After i < n drafts the next token
comes from norm(max(p_i · target - draft, 0)), after all n from the target.

What it gains: each prefix is accepted with probability p_i, the most that any lossless rule can
reach without looking beyond the block. So on average at least as many drafts are accepted as by
`rejection`: a draft that is likelier under the target than under the drafter can make up for an
earlier one that is less likely. For deterministic drafts the two rules accept alike.

Every round needs its own noise. Where the accepted prefix ends depends on the noise of later
positions, and noise keyed by absolute position would decide about those again in the next round.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float32

from jspec.common.typing import RowCounts, TargetProbs
from jspec.sampling.distribution import sample
from jspec.sampling.noise import INDEPENDENT, AcceptanceNoise
from jspec.speculation.acceptance import chain, traversal
from jspec.speculation.types import AcceptanceRule, Proposal, Verdict


def prefix_weights(target_probs: TargetProbs, proposal: Proposal) -> Float32[Array, "b t"]:
    """Returns p_0 to p_w, the probability with which each prefix of drafts is to be accepted."""
    target, draft = (
        chain.probs_of_drafts(target_probs, proposal),
        chain.draft_probs_of_drafts(proposal),
    )
    # Unlike in `rejection`, the minimum is taken of the whole product: a ratio above 1 makes up for
    # smaller ones before it.
    weights = [jnp.ones_like(proposal.num_tokens, jnp.float32)]
    for i in range(proposal.width):
        weights.append(chain.min_ratio(weights[-1] * target[:, i], draft[:, i]))
    return jnp.stack(weights, axis=1)


def good_prefix_probs(target_probs: TargetProbs, proposal: Proposal) -> Float32[Array, "b w"]:
    """Returns h_1 to h_w, the probability that each prefix is good enough; 0 for padding."""
    weights = prefix_weights(target_probs, proposal)[:, 1:]
    residual = _residual_sums(target_probs, proposal, weights)
    # S + 1 - p is 0 only where p is 1 and nothing is left over: such a prefix is good for certain.
    rest = jnp.where(weights < 1, residual + (1 - weights), 1.0)
    probs = jnp.where(weights < 1, residual / rest, 1.0)  # 0 / 0 only between equal distributions
    index, count = jnp.arange(1, proposal.width + 1), proposal.num_tokens[:, None]
    return jnp.where(index < count, probs, jnp.where(index == count, weights, 0.0))


def _residual_sums(
    target_probs: TargetProbs, proposal: Proposal, weights: Float32[Array, "b w"]
) -> Float32[Array, "b w"]:
    """Returns S_1 to S_w; the last, with no draft after it, is 0."""
    target, weights = target_probs[:, 1 : proposal.width], weights[:, :-1, None]
    if proposal.probs is None:
        # The draft itself leaves nothing: p · target(x) <= 1 = draft(x). All other tokens remain.
        is_other = jnp.arange(target.shape[2]) != proposal.tokens[:, 1:, None]
        residual = jnp.where(is_other, weights * target, 0.0)
    else:
        draft = proposal.probs[:, 1:]
        draft = jnp.where(draft > 0, draft, 0.0)  # NaN counts as a draft that was never possible
        residual = jnp.maximum(weights * target - draft, 0.0)
    return jnp.pad(jnp.sum(residual, axis=2), ((0, 0), (0, 1)))


def longest_probs(good_probs: Float32[Array, "b w"]) -> Float32[Array, "b w"]:
    """Returns the probability of accepting i drafts once i - 1 are, from h_1 to h_w."""
    # P(at least i) = h_i + (1 - h_i) · P(at least i + 1), from the last prefix back. This never
    # takes a small difference of large numbers.
    reached = jnp.zeros_like(good_probs[:, 0])
    columns = []
    for i in reversed(range(good_probs.shape[1])):
        reached = good_probs[:, i] + (1 - good_probs[:, i]) * reached
        columns.append(reached)
    reached = jnp.stack(columns[::-1], axis=1)
    before = jnp.pad(reached[:, :-1], ((0, 0), (1, 0)), constant_values=1.0)
    return chain.min_ratio(reached, before)


def acceptance_probs(target_probs: TargetProbs, proposal: Proposal) -> Float32[Array, "b w"]:
    """Returns the probability that each draft is accepted once those before it are, [b w]."""
    return longest_probs(good_prefix_probs(target_probs, proposal))


def next_token_probs(
    target_probs: TargetProbs, proposal: Proposal, num_accepted: RowCounts
) -> Float32[Array, "b v"]:
    """Returns the residual distribution, or the target's own after the last draft."""
    target = chain.probs_after(target_probs, num_accepted)
    draft = chain.draft_distribution_after(proposal, num_accepted, target.shape[1])
    weights = prefix_weights(target_probs, proposal)
    weight = jnp.take_along_axis(weights, num_accepted[:, None], axis=1)
    # After the last draft the target's own distribution applies, without a weight.
    weight = jnp.where((num_accepted < proposal.num_tokens)[:, None], weight, 1.0)
    # Rounding may leave no residual at all. Then draft and target agree, and the target will do.
    return chain.normalised_or(jnp.maximum(weight * target - draft, 0.0), target)


def accept(target_probs: TargetProbs, proposal: Proposal, noise: AcceptanceNoise) -> Verdict:
    """Accepts the longest good prefix, by uniforms [b w]; draws by Gumbel noise [b v]."""
    # Strictly below: a prefix with h = 0 is never good, not even at u = 0.
    is_good = chain.uniforms_of(noise) < good_prefix_probs(target_probs, proposal)
    lengths = jnp.arange(1, proposal.width + 1, dtype=jnp.int32)
    # The longest good prefix counts, even if a shorter one is not good.
    num_accepted = jnp.max(jnp.where(is_good, lengths, 0), axis=1)
    distribution = next_token_probs(target_probs, proposal, num_accepted)
    return Verdict(num_accepted, sample(distribution, noise.gumbel))


RULE = AcceptanceRule(
    acceptance_probs,
    next_token_probs,
    accept,
    INDEPENDENT,
    matches_at_zero=True,
    tree=traversal.RULE,
)

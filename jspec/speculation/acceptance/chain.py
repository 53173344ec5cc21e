"""What the acceptance rules share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from jspec.common.typing import AnyLogits, RowCounts, TargetProbs, Tokens
from jspec.sampling.distribution import best_token, sample
from jspec.sampling.noise import INDEPENDENT, AcceptanceNoise
from jspec.speculation.types import AcceptanceRule, Proposal, Verdict


def count_accepted(is_accepted: Bool[Array, "b w"], proposal: Proposal) -> RowCounts:
    """Returns how many drafts come before the first one rejected."""
    # Neither padding nor NO_TOKEN, which a drafter draws from no distribution, is ever accepted.
    is_real = jnp.arange(proposal.width) < proposal.num_tokens[:, None]
    is_real &= proposal.tokens >= 0
    # The cumulative product is 1 up to the first rejection, and 0 from there on.
    return jnp.sum(jnp.cumprod(is_accepted & is_real, axis=1, dtype=jnp.int32), axis=1)


def probs_of_drafts(target_probs: TargetProbs, proposal: Proposal) -> Float32[Array, "b w"]:
    """Returns the target's probability of each draft; 0 for NO_TOKEN."""
    # The distribution after block token i judges draft i; the last one is for the bonus token.
    probs = target_probs[:, : proposal.width]
    probs = jnp.take_along_axis(probs, proposal.tokens[..., None], axis=2)[..., 0]
    return jnp.where(proposal.tokens >= 0, probs, 0.0)


def probs_after(target_probs: AnyLogits, num_accepted: RowCounts) -> AnyLogits:
    """Returns the target's distribution [b v] of the token after this many drafts."""
    index = num_accepted[:, None, None]
    # A tree of one array, of all ids or of those of a device.
    return jax.tree.map(lambda probs: jnp.take_along_axis(probs, index, axis=1)[:, 0], target_probs)


def target_after(target_probs: AnyLogits, proposal: Proposal, num_accepted: RowCounts) -> AnyLogits:
    """Does the same, as the `next_token_probs` of rules without a residual."""
    del proposal
    return probs_after(target_probs, num_accepted)


def draft_probs_of_drafts(proposal: Proposal) -> Float32[Array, "b w"]:
    """Returns the probability with which each draft was drawn: 1 for deterministic drafts."""
    if proposal.probs is None:
        return jnp.ones(proposal.tokens.shape, jnp.float32)
    return jnp.take_along_axis(proposal.probs, proposal.tokens[..., None], axis=2)[..., 0]


def draft_distribution_after(
    proposal: Proposal, num_accepted: RowCounts, vocab_size: int
) -> Float32[Array, "b v"]:
    """Returns the distribution of the first draft not accepted; zeros after a row's last draft."""
    if proposal.width == 0:
        return jnp.zeros([num_accepted.shape[0], vocab_size], jnp.float32)
    # If all drafts were accepted there is no next draft: any index will do, as zeros replace it.
    index = jnp.minimum(num_accepted, proposal.width - 1)[:, None]
    if proposal.probs is None:
        token = jnp.take_along_axis(proposal.tokens, index, axis=1)[:, 0]
        distribution = jax.nn.one_hot(token, vocab_size, dtype=jnp.float32)
    else:
        distribution = jnp.take_along_axis(proposal.probs, index[..., None], axis=1)[:, 0]
    return jnp.where((num_accepted < proposal.num_tokens)[:, None], distribution, 0.0)


def match(logits: AnyLogits, proposal: Proposal) -> Verdict:
    """Accepts drafts while each is the most likely token; the next token is the most likely too.

    That is what every lossless rule decides at temperature 0. No distribution is needed for it.
    """
    return match_tokens(best_token(logits), proposal)


def match_tokens(tokens: Tokens, proposal: Proposal) -> Verdict:
    """Accepts drafts while each is the target's own token there; the next token is the target's."""
    num_accepted = count_accepted(tokens[:, : proposal.width] == proposal.tokens, proposal)
    return Verdict(num_accepted, jnp.take_along_axis(tokens, num_accepted[:, None], axis=1)[:, 0])


def rule_without_chance(
    acceptance_probs: Callable[..., Array],
    next_token_probs: Callable[..., Array],
    **attributes: Any,
) -> AcceptanceRule:
    """Returns a rule whose acceptance probabilities are all 0 or 1."""

    def accept(target_probs: TargetProbs, proposal: Proposal, noise: AcceptanceNoise) -> Verdict:
        num_accepted = count_accepted(acceptance_probs(target_probs, proposal) > 0, proposal)
        distribution = next_token_probs(target_probs, proposal, num_accepted)
        return Verdict(num_accepted, sample(distribution, noise.gumbel))

    return AcceptanceRule(acceptance_probs, next_token_probs, accept, INDEPENDENT, **attributes)


def uniforms_of(noise: AcceptanceNoise) -> Float32[Array, "b w"]:
    """Returns the uniforms of independent noise.

    Raises:
      ValueError: the noise is shared, which has none.
    """
    if noise.uniforms is None:
        raise ValueError("expected independent noise; got shared noise, which has no uniforms")
    return noise.uniforms


def min_ratio(target: Float32[Array, "..."], draft: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Returns min(1, target / draft), and 0 where `target` is 0 or either is NaN."""
    # The quotient is used only where it is below 1, so it never overflows. Comparisons with NaN are
    # false, which leaves 0.
    ratio = target / jnp.where(draft > 0, draft, 1.0)
    ratio = jnp.where(target < draft, ratio, jnp.where(target >= draft, 1.0, 0.0))
    return jnp.where(target > 0, ratio, 0.0)


def normalised_or(
    weights: Float32[Array, "b v"], instead: Float32[Array, "b v"]
) -> Float32[Array, "b v"]:
    """Returns each row of `weights` summing to 1, or the row of `instead` where all are 0."""
    # NaN is not above 0 either, so a row with NaN takes `instead`.
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1.0), instead)

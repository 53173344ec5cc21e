"""Speculative sampling (Leviathan et al., arXiv 2211.17192, algorithm 1).

Keep a draft x with probability min(1, target(x) / draft(x)). At the first refusal draw from the
residual, norm(max(target - draft, 0)); after the last draft draw from the target. The emitted
tokens then follow the target's law exactly, whatever law the drafts were drawn from.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from jspec.sampling import sample
from jspec.speculation.acceptance.chain import count_accepted, probs_after, probs_of_drafts
from jspec.speculation.noise import INDEPENDENT
from jspec.speculation.types import AcceptanceNoise, AcceptanceRule, Proposal, Verdict
from jspec.typing import RowCounts, TargetProbs


def _draft_probs_of_drafts(proposal: Proposal) -> Float32[Array, "b w"]:
    """Returns the probability with which each draft was drawn: 1 for deterministic drafts."""
    if proposal.probs is None:
        return jnp.ones(proposal.tokens.shape, jnp.float32)
    return jnp.take_along_axis(proposal.probs, proposal.tokens[..., None], axis=2)[..., 0]


def _draft_law_after(
    proposal: Proposal, num_accepted: RowCounts, vocab_size: int
) -> Float32[Array, "b v"]:
    """Returns the law of the draft at index `num_accepted`; zeros where there is no such draft."""
    index = jnp.minimum(num_accepted, proposal.width - 1)[:, None]
    if proposal.probs is None:
        token = jnp.take_along_axis(proposal.tokens, index, axis=1)[:, 0]
        law = jax.nn.one_hot(token, vocab_size, dtype=jnp.float32)
    else:
        law = jnp.take_along_axis(proposal.probs, index[..., None], axis=1)[:, 0]
    return jnp.where((num_accepted < proposal.num_tokens)[:, None], law, 0.0)


def acceptance_probs(target_probs: TargetProbs, proposal: Proposal) -> Float32[Array, "b w"]:
    """Returns min(1, target / draft) at each draft.

    Args:
      target_probs: the target's law at each block token, [b w+1 v].
      proposal: the drafts.
    """
    target, draft = probs_of_drafts(target_probs, proposal), _draft_probs_of_drafts(proposal)
    return jnp.where(target < draft, target / jnp.where(draft > 0, draft, 1.0), 1.0)


def next_token_probs(
    target_probs: TargetProbs, proposal: Proposal, num_accepted: RowCounts
) -> Float32[Array, "b v"]:
    """Returns the residual law, or the target's own after the last draft.

    Where rounding leaves no residual at all, draft and target agree: the target's law stands in.

    Args:
      target_probs: the target's law at each block token, [b w+1 v].
      proposal: the drafts.
      num_accepted: drafts kept, [b].
    """
    target = probs_after(target_probs, num_accepted)
    residual = jnp.maximum(target - _draft_law_after(proposal, num_accepted, target.shape[1]), 0.0)
    total = jnp.sum(residual, axis=-1, keepdims=True)
    return jnp.where(total > 0, residual / jnp.where(total > 0, total, 1.0), target)


def accept(target_probs: TargetProbs, proposal: Proposal, noise: AcceptanceNoise) -> Verdict:
    """Applies the rule.

    A draft is kept if u · draft < target, strictly and without a division: a draft that the target
    gives probability 0 is refused even at u = 0.

    Args:
      target_probs: the target's law at each block token, [b w+1 v].
      proposal: the drafts.
      noise: uniforms [b w] for the drafts, Gumbel noise [b v] for the next token.
    """
    threshold = noise.uniforms * _draft_probs_of_drafts(proposal)
    num_accepted = count_accepted(threshold < probs_of_drafts(target_probs, proposal), proposal)
    law = next_token_probs(target_probs, proposal, num_accepted)
    return Verdict(num_accepted, sample(law, noise.gumbel))


RULE = AcceptanceRule(acceptance_probs, next_token_probs, accept, INDEPENDENT)

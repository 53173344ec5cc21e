"""What every rule over a chain of drafts shares."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from jspec.speculation.types import Proposal
from jspec.typing import RowCounts, TargetProbs


def count_accepted(is_accepted: Bool[Array, "b w"], proposal: Proposal) -> RowCounts:
    """Returns how many drafts come before the first one refused; padding is never accepted."""
    is_real = jnp.arange(proposal.width) < proposal.num_tokens[:, None]
    return jnp.sum(jnp.cumprod(is_accepted & is_real, axis=1, dtype=jnp.int32), axis=1)


def probs_of_drafts(target_probs: TargetProbs, proposal: Proposal) -> Float32[Array, "b w"]:
    """Returns the target's probability of each draft."""
    probs = target_probs[:, : proposal.width]
    return jnp.take_along_axis(probs, proposal.tokens[..., None], axis=2)[..., 0]


def probs_after(target_probs: TargetProbs, num_accepted: RowCounts) -> Float32[Array, "b v"]:
    """Returns the target's law of the token after that many drafts."""
    return jnp.take_along_axis(target_probs, num_accepted[:, None, None], axis=1)[:, 0]

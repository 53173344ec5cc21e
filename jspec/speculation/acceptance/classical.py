"""Classical rejection sampling of one draft, for comparison (Leviathan et al., 2211.17192, A.2).

Keep a draft x with probability target(x) / (M · draft(x)), M = max over x of target(x) / draft(x),
and else draw from the target, which needs no residual. Lossless as well, but a draft is kept with
probability 1 / M only, never more than the sum of min(target, draft) that `rejection` reaches; not
at all where the drafter can never say what the target may.
"""

from typing import TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Float32

from jspec.common.typing import RowFlags, RowTokens
from jspec.sampling.distribution import sample

Distribution: TypeAlias = Float32[Array, "b v"]


def acceptance_rate(target_probs: Distribution, draft_probs: Distribution) -> Float32[Array, "b"]:
    """Returns 1 / M, the smallest draft / target over the tokens that the target may say.

    Args:
      target_probs: the target's distribution.
      draft_probs: the distribution the draft is drawn from.
    """
    is_possible = target_probs > 0
    ratio = draft_probs / jnp.where(is_possible, target_probs, 1.0)
    return jnp.min(jnp.where(is_possible, ratio, jnp.inf), axis=-1)


def acceptance_probs(target_probs: Distribution, draft_probs: Distribution) -> Distribution:
    """Returns target(x) / (M · draft(x)) for every token x; 0 for one that is never drafted.

    Args:
      target_probs: the target's distribution.
      draft_probs: the distribution the draft is drawn from.
    """
    is_drafted = draft_probs > 0
    ratio = target_probs / jnp.where(is_drafted, draft_probs, 1.0)
    rate = acceptance_rate(target_probs, draft_probs)[:, None]
    return jnp.where(is_drafted, jnp.minimum(rate * ratio, 1.0), 0.0)


def accept(
    target_probs: Distribution,
    tokens: RowTokens,
    draft_probs: Distribution,
    uniforms: Float32[Array, "b"],
    gumbel: Distribution,
) -> tuple[RowFlags, RowTokens]:
    """Returns whether each draft is kept, and the token that comes out.

    Args:
      target_probs: the target's distribution.
      tokens: the drafts, [b].
      draft_probs: the distribution they were drawn from.
      uniforms: in [0, 1), [b].
      gumbel: standard Gumbel noise for the token after a refusal.
    """
    probs = acceptance_probs(target_probs, draft_probs)
    is_kept = uniforms < jnp.take_along_axis(probs, tokens[:, None], axis=1)[:, 0]
    return is_kept, jnp.where(is_kept, tokens, sample(target_probs, gumbel))

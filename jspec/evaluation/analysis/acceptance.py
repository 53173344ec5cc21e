"""How often drafts are kept, and what is said in their place, in theory: from two distributions."""

import jax.numpy as jnp
from jaxtyping import Array, Float32

from jspec.speculation.acceptance.chain import min_ratio, normalised_or

Distributions = Float32[Array, "... v"]
Values = Float32[Array, "..."]


def expected_acceptance(target_probs: Distributions, draft_probs: Distributions) -> Values:
    """Returns how likely speculative sampling keeps a draft drawn from a distribution.

        alpha = E[min(1, target(x) / draft(x))] = sum over x of min(target(x), draft(x))

    which is 1 - D(target, draft), D the total variation; its mean over contexts is the expected
    acceptance rate (Leviathan et al., arXiv 2211.17192, Cor. 3.6).

    Args:
      target_probs: distributions of the target, [... v]; normalised.
      draft_probs: the distributions that drafts are drawn from, [... v]; normalised. The
        distribution of a draft that follows from the context alone is one-hot.
    """
    return jnp.sum(jnp.minimum(target_probs, draft_probs), axis=-1)


def divergence(one: Distributions, other: Distributions) -> Values:
    """Returns how far two distributions are apart, from 0 (equal) to 1 (disjoint).

        D(p, q) = sum over x of |p(x) - M(x)|,  M = (p + q) / 2

    (arXiv 2211.17192, Def. 3.2.) That is the total variation, half the sum of |p(x) - q(x)|; and 1
    minus it is the acceptance (Thm 3.5, Lemma 3.3).

    Args:
      one: distributions, [... v]; normalised.
      other: likewise.
    """
    return jnp.sum(jnp.abs(one - (one + other) / 2), axis=-1)


def lenient_acceptance(
    target_probs: Distributions, draft_probs: Distributions, lenience: float
) -> Values:
    """Returns how likely the rule `lenient` keeps a draft (arXiv 2211.17192, A.5).

        sum over x of draft(x) · min(1, target(x) / (l · draft(x))) = sum of min(draft, target / l)

    Args:
      target_probs: distributions of the target, [... v]; normalised.
      draft_probs: the distributions that drafts are drawn from, likewise.
      lenience: l, from 0 to 1; at 0 whatever the target may say at all is kept.
    """
    return jnp.sum(_leniently_kept(target_probs, draft_probs, lenience), axis=-1)


def lenient_next_token_probs(
    target_probs: Distributions, draft_probs: Distributions, lenience: float
) -> Distributions:
    """Returns the distribution of the token that comes out where there is one draft, under
    `lenient`.

        min(draft, target / l) + (1 - sum of it) · norm(max(target - draft, 0))

    Its `divergence` from the target is what lenience costs; at l = 1 it is the target's
    distribution.

    Args:
      target_probs: distributions of the target, [... v]; normalised.
      draft_probs: the distributions that drafts are drawn from, likewise.
      lenience: l, from 0 to 1.
    """
    kept = _leniently_kept(target_probs, draft_probs, lenience)
    residual = normalised_or(jnp.maximum(target_probs - draft_probs, 0.0), target_probs)
    return kept + (1 - jnp.sum(kept, axis=-1, keepdims=True)) * residual


def lenient_argmax_kept(
    distribution: Distributions, draft_probs: Distributions, lenience: float
) -> Distributions:
    """Returns the probability that x is drafted and that `lenient_argmax` keeps it, for every x.

    It keeps x if distribution(x) >= l · max(distribution); what it does not keep becomes the most
    likely token.

    Args:
      distribution: of the target at temperature 1, [... v].
      draft_probs: the distributions that drafts are drawn from, [... v].
      lenience: l, from 0 to 1.
    """
    best = jnp.max(distribution, axis=-1, keepdims=True)
    return jnp.where((distribution >= lenience * best) & (distribution > 0), draft_probs, 0.0)


def _leniently_kept(
    target_probs: Distributions, draft_probs: Distributions, lenience: float
) -> Distributions:
    return draft_probs * min_ratio(target_probs, lenience * draft_probs)


def classical_acceptance(
    target_probs: Float32[Array, "b v"], draft_probs: Float32[Array, "b v"]
) -> Float32[Array, "b"]:
    """Returns how often classical rejection sampling accepts a draft (arXiv 2211.17192, A.2).

    It accepts x with probability target(x) / (M · draft(x)), where M is the maximum of target /
    draft, and draws from the target after a rejection. That needs no residual and is lossless too,
    but it accepts with probability 1 / M, never more than the sum of min(target, draft).

    Args:
      target_probs: the target's distribution.
      draft_probs: the distribution from which the draft is drawn.
    """
    is_possible = target_probs > 0
    ratio = draft_probs / jnp.where(is_possible, target_probs, 1.0)
    return jnp.min(jnp.where(is_possible, ratio, jnp.inf), axis=-1)

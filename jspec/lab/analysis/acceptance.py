"""Probabilities that drafts are accepted, and the distribution that comes out, in theory.

Distributions are float32 [... v] and normalised: those of the target, and those that drafts are
drawn from. The distribution of a draft that follows from the context alone is one-hot. `lenience`
is the l of arXiv 2211.17192, A.5, from 0 to 1.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float32

from jspec.speculation.acceptance.chain import min_ratio, normalised_or

Distributions = Float32[Array, "... v"]
Values = Float32[Array, "..."]


def expected_acceptance(target_probs: Distributions, draft_probs: Distributions) -> Values:
    """Returns how likely speculative sampling accepts a draft drawn from a distribution.

        alpha = E[min(1, target(x) / draft(x))] = sum over x of min(target(x), draft(x))

    which is 1 - D(target, draft), D the total variation; its mean over contexts is the expected
    acceptance rate (Leviathan et al., arXiv 2211.17192, Cor. 3.6).
    """
    return jnp.sum(jnp.minimum(target_probs, draft_probs), axis=-1)


def divergence(target: Distributions, draft: Distributions) -> Values:
    """Returns how far two distributions are apart, from 0 (equal) to 1 (disjoint).

    The total variation, half the sum of |one(x) - other(x)|, which is D of arXiv 2211.17192, Def.
    3.2; 1 minus it is the acceptance (Thm 3.5, Lemma 3.3).
    """
    return jnp.sum(jnp.abs(target - (target + draft) / 2), axis=-1)


def lenient_acceptance(
    target_probs: Distributions, draft_probs: Distributions, lenience: float
) -> Values:
    """Returns how likely the rule `lenient` accepts a draft; at l = 0 every token that is possible.

    sum over x of draft(x) · min(1, target(x) / (l · draft(x))) = sum of min(draft, target / l)
    """
    return jnp.sum(_leniently_accepted(target_probs, draft_probs, lenience), axis=-1)


def lenient_next_token_probs(
    target_probs: Distributions, draft_probs: Distributions, lenience: float
) -> Distributions:
    """Returns the distribution of what comes out where there is one draft, under `lenient`.

        min(draft, target / l) + (1 - sum of it) · norm(max(target - draft, 0))

    Its `divergence` from the target is what lenience costs; at l = 1 it is the target's
    distribution.
    """
    accepted = _leniently_accepted(target_probs, draft_probs, lenience)
    residual = normalised_or(jnp.maximum(target_probs - draft_probs, 0.0), target_probs)
    return accepted + (1 - jnp.sum(accepted, axis=-1, keepdims=True)) * residual


def lenient_argmax_accepted(
    distribution: Distributions, draft_probs: Distributions, lenience: float
) -> Distributions:
    """Returns the probability that x is drafted and `lenient_argmax` accepts it, for every x.

    It accepts x if distribution(x) >= l · max(distribution), with the target's distribution at
    temperature 1; a rejected draft becomes the most likely token.
    """
    best = jnp.max(distribution, axis=-1, keepdims=True)
    return jnp.where((distribution >= lenience * best) & (distribution > 0), draft_probs, 0.0)


def _leniently_accepted(
    target_probs: Distributions, draft_probs: Distributions, lenience: float
) -> Distributions:
    return draft_probs * min_ratio(target_probs, lenience * draft_probs)

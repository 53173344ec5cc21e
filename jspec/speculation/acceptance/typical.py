"""Typical acceptance (Medusa: Cai et al., arXiv 2401.10774, section 2.3.1).

Lossy. A draft is accepted if the target finds it likely enough, and the less sure the target is,
the less likely it need be:

  target(x) > min(epsilon, delta · exp(-H)),

where H is the entropy of the target's distribution there, in nats. The token after the last
accepted draft is drawn from the target's own distribution, so a round emits at least one token. How
the drafts were drawn plays no part. At temperature 0 this is the greedy match. Of a tree's paths of
accepted drafts the longest is kept.
"""

import functools

import jax.numpy as jnp
from jax.scipy.special import entr
from jaxtyping import Array, Float32

from jspec.common.typing import TargetProbs
from jspec.speculation.acceptance import siblings
from jspec.speculation.acceptance.chain import probs_of_drafts, rule_without_chance, target_after
from jspec.speculation.types import AcceptanceRule, Proposal


def acceptance_probs(
    target_probs: TargetProbs, proposal: Proposal, *, epsilon: float, delta: float
) -> Float32[Array, "b w"]:
    """Returns 1 where a draft is typical of the target, and 0 elsewhere, [b w].

    A probability of `epsilon` is always enough, and so is the part `delta` of exp(-H).
    """
    entropy = jnp.sum(entr(target_probs[:, : proposal.width]), axis=-1)
    # exp(-H) is the probability of a token of average surprise.
    threshold = jnp.minimum(epsilon, delta * jnp.exp(-entropy))
    return (probs_of_drafts(target_probs, proposal) > threshold).astype(jnp.float32)


@functools.cache  # one object for equal options: JAX finds a compiled program by its rule
def make_rule(epsilon: float, delta: float) -> AcceptanceRule:
    """Returns the rule."""
    probs = functools.partial(acceptance_probs, epsilon=epsilon, delta=delta)
    tree = siblings.make_longest_rule(probs, target_after)
    return rule_without_chance(probs, target_after, is_lossless=False, tree=tree)

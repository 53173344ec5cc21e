"""Typical acceptance (Medusa: Cai et al., arXiv 2401.10774, section 2.3.1).

Lossy. A draft is accepted if the target finds it likely enough, and the less sure the target is,
the less likely it need be:

  target(x) > min(epsilon, delta · exp(-H)),

where H is the entropy of the target's distribution there, in nats. The token after the last
accepted draft is drawn from the target's own distribution, so a round emits at least one token. How
the drafts were drawn plays no part. At temperature 0 this is the greedy match.
"""

import functools

import jax.numpy as jnp
from jax.scipy.special import entr
from jaxtyping import Array, Float32

from jspec.common.errors import InputError
from jspec.common.typing import RowCounts, TargetProbs
from jspec.sampling.distribution import sample
from jspec.sampling.noise import INDEPENDENT, AcceptanceNoise
from jspec.speculation.acceptance.chain import count_accepted, probs_after, probs_of_drafts
from jspec.speculation.acceptance.types import AcceptanceRule, Proposal, Verdict


def acceptance_probs(
    target_probs: TargetProbs, proposal: Proposal, *, epsilon: float, delta: float
) -> Float32[Array, "b w"]:
    """Returns 1 where a draft is typical of the target, and 0 elsewhere, [b w].

    Args:
      target_probs: the target's distribution at each block token, [b w+1 v].
      proposal: the drafts.
      epsilon: a probability that is always enough.
      delta: the part of exp(-H), the probability of a token of average surprise, that is enough.
    """
    entropy = jnp.sum(entr(target_probs[:, : proposal.width]), axis=-1)
    # exp(-H) is the probability of a token of average surprise.
    threshold = jnp.minimum(epsilon, delta * jnp.exp(-entropy))
    return (probs_of_drafts(target_probs, proposal) > threshold).astype(jnp.float32)


def next_token_probs(
    target_probs: TargetProbs, proposal: Proposal, num_accepted: RowCounts
) -> Float32[Array, "b v"]:
    """Returns the target's distribution after `num_accepted` [b] drafts."""
    del proposal
    return probs_after(target_probs, num_accepted)


def accept(
    target_probs: TargetProbs,
    proposal: Proposal,
    noise: AcceptanceNoise,
    *,
    epsilon: float,
    delta: float,
) -> Verdict:
    """Applies the rule, with Gumbel noise [b v] for the next token; see `acceptance_probs`."""
    probs = acceptance_probs(target_probs, proposal, epsilon=epsilon, delta=delta)
    num_accepted = count_accepted(probs > 0, proposal)
    return Verdict(num_accepted, sample(probs_after(target_probs, num_accepted), noise.gumbel))


@functools.cache  # one object for equal options: JAX finds a compiled program by its rule
def make_rule(epsilon: float, delta: float) -> AcceptanceRule:
    """Returns the rule.

    Raises:
      InputError: `epsilon` or `delta` is not from 0 to 1.
    """
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        if not 0 <= value <= 1:
            raise InputError(f"expected a typical {name} from 0 to 1; got {value}")
    options = {"epsilon": epsilon, "delta": delta}
    return AcceptanceRule(
        functools.partial(acceptance_probs, **options),
        next_token_probs,
        functools.partial(accept, **options),
        INDEPENDENT,
        is_lossless=False,
    )

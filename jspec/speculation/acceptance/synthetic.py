"""Acceptance at a given rate, whatever the models predict: a means to measure speed.

The emitted text means nothing. Each draft is accepted with the same probability, the alpha of
Theorem 3.8 (Leviathan et al., arXiv 2211.17192), so real rounds can be timed at any acceptance.

The rule tosses a coin: a draft is accepted if its uniform is below a half. The noise loads the
coin, by a rate that is a part of the request's seed (`seed_of`), so one compiled program serves all
rates.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from jspec.common.typing import RowCounts, RowSeeds, TargetProbs
from jspec.sampling.distribution import sample
from jspec.sampling.noise import INDEPENDENT, AcceptanceNoise
from jspec.speculation.acceptance import chain
from jspec.speculation.types import AcceptanceRule, Proposal, Temperatures, Verdict

_HALF = 0.5
_BITS = 16  # of a seed, for the rate; the others tell requests apart
_MOST = 2**_BITS - 1


def seed_of(rate: float, number: int) -> int:
    """Returns a seed that holds a rate from 0 to 1, rounded to 1/65535, and a request's number."""
    return round(rate * _MOST) << _BITS | number % 2**_BITS


def rate_of(seed: RowSeeds) -> Float32[Array, "b"]:
    """Returns the rates that seeds hold, [b]; rates of 0 and 1 are exact."""
    return (seed >> _BITS).astype(jnp.float32) / _MOST


def acceptance_probs(target_probs: TargetProbs, proposal: Proposal) -> Float32[Array, "b w"]:
    """Returns a half for each draft, [b w]: the probability under noise that is not loaded."""
    del target_probs
    return jnp.full(proposal.tokens.shape, _HALF, jnp.float32)


def accept(target_probs: TargetProbs, proposal: Proposal, noise: AcceptanceNoise) -> Verdict:
    """Accepts drafts while their uniforms are below a half."""
    num_accepted = chain.count_accepted(chain.uniforms_of(noise) < _HALF, proposal)
    return Verdict(
        num_accepted, sample(chain.probs_after(target_probs, num_accepted), noise.gumbel)
    )


def loaded_noise(
    seed: RowSeeds, position: RowCounts, width: int, vocab_size: int, is_random: Bool[Array, ""]
) -> AcceptanceNoise:
    """Returns independent noise whose uniforms are below a half with the rate of the row's seed."""
    # The coin is loaded in the noise, so that the rule itself is the same for every rate.
    noise = INDEPENDENT.acceptance(seed, position, width, vocab_size, is_random)
    # 0 is below a half, and a half is not: the coin falls as the loaded uniforms decided.
    is_kept = chain.uniforms_of(noise) < rate_of(seed)[:, None]
    return noise.replace(uniforms=jnp.where(is_kept, 0.0, _HALF))


RULE = AcceptanceRule(
    acceptance_probs,
    chain.target_after,
    accept,
    INDEPENDENT._replace(acceptance=loaded_noise),
    temperatures=Temperatures.POSITIVE,  # at 0 there is no noise that it could draw from
    is_lossless=False,
)

"""Lenience (Leviathan et al., arXiv 2211.17192, A.5): more drafts accepted, at a stated price.

Lossy. The lenience l, from 0 to 1, bounds how far the output may leave the target's distribution; 1
is no lenience at all.

When sampling, a draft is accepted with probability min(1, target / (l · draft)), and the residual
stays what it is. No token is then emitted with a probability above target / l. (There is no bound
on how rare a token may become.)

At temperature 0 a draft is accepted if target >= l · max(target), by the target's distribution at
temperature 1. The paper prints this inequality reversed, which would accept the unlikely drafts.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float32

from jspec.common.errors import InputError
from jspec.common.typing import Logits, TargetProbs
from jspec.sampling.distribution import sample, sampling_probs
from jspec.sampling.noise import INDEPENDENT, AcceptanceNoise
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.acceptance import greedy, rejection
from jspec.speculation.acceptance.chain import (
    count_accepted,
    draft_probs_of_drafts,
    min_ratio,
    probs_of_drafts,
    uniforms_of,
)
from jspec.speculation.acceptance.types import AcceptanceRule, Proposal, Temperatures, Verdict


def acceptance_probs(
    target_probs: TargetProbs, proposal: Proposal, *, lenience: float
) -> Float32[Array, "b w"]:
    """Returns min(1, target / (lenience · draft)) at each draft; see `AcceptanceRule`."""
    # As if the drafter had found its drafts less likely than it did.
    draft = lenience * draft_probs_of_drafts(proposal)
    return min_ratio(probs_of_drafts(target_probs, proposal), draft)


def accept(
    target_probs: TargetProbs, proposal: Proposal, noise: AcceptanceNoise, *, lenience: float
) -> Verdict:
    """Applies the form for sampling: accept a draft if u · lenience · draft < target, strictly."""
    threshold = uniforms_of(noise) * (lenience * draft_probs_of_drafts(proposal))
    num_accepted = count_accepted(threshold < probs_of_drafts(target_probs, proposal), proposal)
    # The residual of `rejection`, unchanged: that bounds every token's probability by target / l.
    distribution = rejection.next_token_probs(target_probs, proposal, num_accepted)
    return Verdict(num_accepted, sample(distribution, noise.gumbel))


def argmax_acceptance_probs(
    target_probs: TargetProbs, proposal: Proposal, *, lenience: float
) -> Float32[Array, "b w"]:
    """Returns 1 where a draft is nearly as likely as the most likely token, and 0 elsewhere, [b w].

    Args:
      target_probs: the target's distribution at temperature 1 at each block token, [b w+1 v].
      proposal: the drafts.
      lenience: from 0 to 1.
    """
    target = probs_of_drafts(target_probs, proposal)
    best = jnp.max(target_probs[:, : proposal.width], axis=-1)
    # Even at lenience 0 a token that the filters have removed is not accepted.
    return ((target >= lenience * best) & (target > 0)).astype(jnp.float32)


def accept_argmax(
    target_probs: TargetProbs, proposal: Proposal, noise: AcceptanceNoise, *, lenience: float
) -> Verdict:
    """Applies the form for temperature 0, without noise; the next token is the most likely one."""
    del noise
    probs = argmax_acceptance_probs(target_probs, proposal, lenience=lenience)
    num_accepted = count_accepted(probs > 0, proposal)
    distribution = greedy.next_token_probs(target_probs, proposal, num_accepted)
    return Verdict(num_accepted, sample(distribution, jnp.zeros_like(distribution)))


def distribution_at_temperature_one(logits: Logits, settings: SamplingSettings) -> TargetProbs:
    """Returns the target's distribution as sampled at temperature 1, with the settings' filters."""
    temperature = jnp.ones_like(settings.temperature)
    return sampling_probs(logits, settings.replace(temperature=temperature))


@functools.cache  # one object for each lenience: JAX finds a compiled program by its rule
def make_rule(lenience: float) -> AcceptanceRule:
    """Returns the rule for sampling.

    Raises:
      InputError: `lenience` is not from 0 to 1.
    """
    _check(lenience)
    return AcceptanceRule(
        functools.partial(acceptance_probs, lenience=lenience),
        rejection.next_token_probs,
        functools.partial(accept, lenience=lenience),
        INDEPENDENT,
        temperatures=Temperatures.POSITIVE,
        is_lossless=False,
    )


@functools.cache
def make_argmax_rule(lenience: float) -> AcceptanceRule:
    """Returns the rule for temperature 0.

    Raises:
      InputError: `lenience` is not from 0 to 1.
    """
    _check(lenience)
    return AcceptanceRule(
        functools.partial(argmax_acceptance_probs, lenience=lenience),
        greedy.next_token_probs,
        functools.partial(accept_argmax, lenience=lenience),
        INDEPENDENT,
        distribution=distribution_at_temperature_one,
        temperatures=Temperatures.ZERO,
        is_lossless=False,
    )


def _check(lenience: float) -> None:
    if not 0 <= lenience <= 1:
        raise InputError(f"expected a lenience from 0 to 1; got {lenience}")

"""Lenience (Leviathan et al., arXiv 2211.17192, A.5): more drafts kept, at a stated price.

Lossy. A lenience l from 0 to 1 says how much more often than the target's distribution allows a
draft may come out; 1 is no lenience at all.

When sampling, a draft is kept with probability min(1, target / (l · draft)), the residual staying
what it is: no token is then emitted with more than target / l (how seldom it may come has no
bound). At temperature 0 a draft is kept if target >= l · max(target), the target's distribution
being that of temperature 1. The paper prints this inequality reversed, which would keep the
unlikely.
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
    """Returns min(1, target / (lenience · draft)) at each draft of [b w].

    Args:
      target_probs: the target's distribution at each block token, [b w+1 v].
      proposal: the drafts.
      lenience: from 0 to 1.
    """
    draft = lenience * draft_probs_of_drafts(proposal)
    return min_ratio(probs_of_drafts(target_probs, proposal), draft)


def accept(
    target_probs: TargetProbs, proposal: Proposal, noise: AcceptanceNoise, *, lenience: float
) -> Verdict:
    """Applies the sampling form: a draft is kept if u · lenience · draft < target, strictly.

    Args:
      target_probs: the target's distribution at each block token, [b w+1 v].
      proposal: the drafts.
      noise: uniforms [b w] for the drafts, Gumbel noise [b v] for the next token.
      lenience: from 0 to 1.
    """
    threshold = uniforms_of(noise) * (lenience * draft_probs_of_drafts(proposal))
    num_accepted = count_accepted(threshold < probs_of_drafts(target_probs, proposal), proposal)
    distribution = rejection.next_token_probs(target_probs, proposal, num_accepted)
    return Verdict(num_accepted, sample(distribution, noise.gumbel))


def argmax_acceptance_probs(
    target_probs: TargetProbs, proposal: Proposal, *, lenience: float
) -> Float32[Array, "b w"]:
    """Returns [b w], 1 where a draft is nearly as likely as the most likely token.

    A token of probability 0, which the filters have removed, is never kept.

    Args:
      target_probs: the target's distribution at temperature 1 at each block token, [b w+1 v].
      proposal: the drafts.
      lenience: from 0 to 1.
    """
    target = probs_of_drafts(target_probs, proposal)
    best = jnp.max(target_probs[:, : proposal.width], axis=-1)
    return ((target >= lenience * best) & (target > 0)).astype(jnp.float32)


def accept_argmax(
    target_probs: TargetProbs, proposal: Proposal, noise: AcceptanceNoise, *, lenience: float
) -> Verdict:
    """Applies the form for temperature 0; the next token is the target's most likely one.

    Args:
      target_probs: the target's distribution at temperature 1 at each block token, [b w+1 v].
      proposal: the drafts.
      noise: unused.
      lenience: from 0 to 1.
    """
    del noise
    probs = argmax_acceptance_probs(target_probs, proposal, lenience=lenience)
    num_accepted = count_accepted(probs > 0, proposal)
    distribution = greedy.next_token_probs(target_probs, proposal, num_accepted)
    return Verdict(num_accepted, sample(distribution, jnp.zeros_like(distribution)))


def distribution_at_temperature_one(logits: Logits, settings: SamplingSettings) -> TargetProbs:
    """Returns the target's distribution, filters and all, as if it were sampled at temperature 1.

    Args:
      logits: [b t v].
      settings: one row each; their temperature is not looked at.
    """
    temperature = jnp.ones_like(settings.temperature)
    return sampling_probs(logits, settings.replace(temperature=temperature))


@functools.cache  # a compiled program is found again by the rule it was compiled for
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

"""Lenience (Leviathan et al., arXiv 2211.17192, A.5): more drafts accepted, at a stated price.

Lossy. The lenience l, from 0 to 1, bounds how far the output may leave the target's distribution; 1
is no lenience at all.

When sampling, a draft is accepted with probability min(1, target / (l · draft)), and the residual
stays what it is. No token is then emitted with a probability above target / l. (There is no bound
on how rare a token may become.) The same holds on a tree, where siblings are tried in turn.

At temperature 0 a draft is accepted if target >= l · max(target), by the target's distribution at
temperature 1. The paper prints this inequality reversed, which would accept the unlikely drafts.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float32

from jspec.common.typing import Logits, TargetProbs
from jspec.sampling.distribution import sampling_probs
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.acceptance import greedy, rejection, siblings
from jspec.speculation.acceptance.chain import probs_of_drafts, rule_without_chance
from jspec.speculation.acceptance.tree import Tree
from jspec.speculation.types import AcceptanceRule, Proposal, Temperatures


def argmax_acceptance_probs(
    target_probs: TargetProbs, proposal: Proposal, *, lenience: float
) -> Float32[Array, "b w"]:
    """Returns 1 where a draft is nearly as likely as the most likely token, and 0 elsewhere, [b w].

    The target's distributions are those at temperature 1.
    """
    target = probs_of_drafts(target_probs, proposal)
    best = jnp.max(target_probs[:, : proposal.width], axis=-1)
    # Even at lenience 0 a token that the filters have removed is not accepted.
    return ((target >= lenience * best) & (target > 0)).astype(jnp.float32)


def distribution_at_temperature_one(logits: Logits, settings: SamplingSettings) -> TargetProbs:
    """Returns the target's distribution as sampled at temperature 1, with the settings' filters."""
    temperature = jnp.ones_like(settings.temperature)
    return sampling_probs(logits, settings.replace(temperature=temperature))


@functools.cache  # one object for each lenience: JAX finds a compiled program by its rule
def make_rule(lenience: float) -> AcceptanceRule:
    """Returns the rule for sampling."""

    def trial(target_probs: TargetProbs, proposal: Proposal, tree: Tree) -> siblings.Trial:
        tried = siblings.try_all(target_probs, proposal, tree)
        return tried._replace(draft=lenience * tried.draft)

    # The residual of `rejection`, unchanged: it bounds every token's probability by target / l.
    return rejection.RULE._replace(
        acceptance_probs=functools.partial(rejection.acceptance_probs, lenience=lenience),
        accept=functools.partial(rejection.accept, lenience=lenience),
        matches_at_zero=False,
        temperatures=Temperatures.POSITIVE,
        is_lossless=False,
        tree=siblings.make_rule(trial),
    )


@functools.cache
def make_argmax_rule(lenience: float) -> AcceptanceRule:
    """Returns the rule for temperature 0."""
    probs = functools.partial(argmax_acceptance_probs, lenience=lenience)
    return rule_without_chance(
        probs,
        greedy.next_token_probs,
        distribution=distribution_at_temperature_one,
        temperatures=Temperatures.ZERO,
        is_lossless=False,
        tree=siblings.make_longest_rule(probs, greedy.next_token_probs),
    )

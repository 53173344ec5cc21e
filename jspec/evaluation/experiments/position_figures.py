"""What the distributions of target and draft at each position of a text give for drafts there."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from jspec.evaluation.analysis.acceptance import (
    divergence,
    expected_acceptance,
    lenient_acceptance,
    lenient_argmax_accepted,
    lenient_next_token_probs,
)
from jspec.evaluation.experiments.draft_distributions import FirstDrafts
from jspec.sampling.distribution import sampling_probs
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.acceptance.lenient import distribution_at_temperature_one

_HostOrDeviceArray = Any


class PositionFigures(NamedTuple):
    """Figures of every position.

    Attributes:
      is_proposed: whether the drafter proposes a token, [t].
      overlap: the probability that its draft is accepted, [t].
      entropy: of the target's own distribution, at temperature 1 and without filters, in nats, [t].
      lenient_acceptance: the probability that its draft is accepted, for each lenience, [t l].
      total_variation: between the target's distribution and the one that is then emitted, [t l].
    """

    is_proposed: _HostOrDeviceArray
    overlap: _HostOrDeviceArray
    entropy: _HostOrDeviceArray
    lenient_acceptance: _HostOrDeviceArray
    total_variation: _HostOrDeviceArray


@functools.partial(jax.jit, static_argnames=("leniences", "is_random"))
def position_figures(
    logits: Float32[Array, "t v"],
    drafts: FirstDrafts,
    settings: SamplingSettings,
    *,
    leniences: tuple[float, ...],
    is_random: bool,
) -> PositionFigures:
    """Returns the figures.

    Args:
      logits: the target's.
      drafts: what is proposed.
      settings: the target's, of one row.
      leniences: of the rule `lenient`, or of `lenient_argmax` at temperature 0.
      is_random: whether the target's temperature is above 0.
    """
    target, own = sampling_probs(logits[None], settings)[0], jax.nn.softmax(logits, axis=1)
    surprise = jnp.where(own > 0, -jnp.log(jnp.where(own > 0, own, 1.0)), 0.0)
    at_one = None if is_random else distribution_at_temperature_one(logits[None], settings)[0]
    columns = [_lenient(target, at_one, drafts.probs, lenience) for lenience in leniences]
    none = jnp.zeros([logits.shape[0], 0], jnp.float32)
    accepted, variation = (
        jnp.concatenate([none, *(pair[i][:, None] for pair in columns)], axis=1) for i in range(2)
    )
    overlap, entropy = expected_acceptance(target, drafts.probs), jnp.sum(own * surprise, axis=1)
    return PositionFigures(drafts.is_proposed, overlap, entropy, accepted, variation)


def _lenient(
    target: Float32[Array, "t v"],
    at_one: Float32[Array, "t v"] | None,
    draft: Float32[Array, "t v"],
    lenience: float,
) -> tuple[Float32[Array, "t"], Float32[Array, "t"]]:
    """Returns how likely a draft is accepted, and how far the emitted distribution is off.

    At temperature 0 `target` is one-hot, and `at_one` is the distribution at temperature 1.
    """
    if at_one is None:
        emitted = lenient_next_token_probs(target, draft, lenience)
        return lenient_acceptance(target, draft, lenience), divergence(target, emitted)
    kept = lenient_argmax_accepted(at_one, draft, lenience)
    acceptance = jnp.sum(kept, axis=1)
    return acceptance, divergence(target, kept + (1 - acceptance[:, None]) * target)

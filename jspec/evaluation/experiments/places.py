"""What two distributions at each place of a text say of drafts there."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from jspec.evaluation.analysis.acceptance import (
    divergence,
    expected_acceptance,
    lenient_acceptance,
    lenient_argmax_kept,
    lenient_next_token_probs,
)
from jspec.evaluation.experiments.draft_distribution import FirstDrafts
from jspec.sampling.distribution import SamplingSettings, sampling_probs
from jspec.speculation.acceptance.lenient import distribution_at_temperature_one

AnyArray = Any  # of the device or of the host


class Places(NamedTuple):
    """Figures of every place.

    Attributes:
      is_proposed: whether the drafter has something to say, [t].
      overlap: how likely its draft is kept, [t].
      entropy: of the target's own distribution, at temperature 1 and without filters, in nats, [t].
      lenient_acceptance: how likely its draft is kept under each lenience, [t l].
      total_variation: of the distribution that then comes out from the target's, [t l].
    """

    is_proposed: AnyArray
    overlap: AnyArray
    entropy: AnyArray
    lenient_acceptance: AnyArray
    total_variation: AnyArray


@functools.partial(jax.jit, static_argnames=("leniences", "is_random"))
def look_at_places(
    logits: Float32[Array, "t v"],
    drafts: FirstDrafts,
    settings: SamplingSettings,
    *,
    leniences: tuple[float, ...],
    is_random: bool,
) -> Places:
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
    distribution = (
        target if is_random else distribution_at_temperature_one(logits[None], settings)[0]
    )
    be_lenient = _be_lenient if is_random else _be_lenient_at_zero
    pairs = [be_lenient(target, distribution, drafts.probs, lenience) for lenience in leniences]
    nothing = jnp.zeros([logits.shape[0], 0], jnp.float32)
    kept, far = nothing, nothing
    if pairs:
        kept, far = (jnp.stack(column, axis=1) for column in zip(*pairs, strict=True))
    overlap = expected_acceptance(target, drafts.probs)
    return Places(drafts.is_proposed, overlap, jnp.sum(own * surprise, axis=1), kept, far)


Pair = tuple[Float32[Array, "t"], Float32[Array, "t"]]


def _be_lenient(
    target: Float32[Array, "t v"],
    distribution: Float32[Array, "t v"],
    draft: Float32[Array, "t v"],
    lenience: float,
) -> Pair:
    """Returns how likely a draft is kept, and how far what comes out is from the target's
    distribution.
    """
    del distribution
    emitted = lenient_next_token_probs(target, draft, lenience)
    return lenient_acceptance(target, draft, lenience), divergence(target, emitted)


def _be_lenient_at_zero(
    target: Float32[Array, "t v"],
    distribution: Float32[Array, "t v"],
    draft: Float32[Array, "t v"],
    lenience: float,
) -> Pair:
    """Likewise; `target` is one-hot, and `distribution` is what it is at temperature 1."""
    kept = lenient_argmax_kept(distribution, draft, lenience)
    acceptance = jnp.sum(kept, axis=1)
    return acceptance, divergence(target, kept + (1 - acceptance[:, None]) * target)

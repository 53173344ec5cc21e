"""One draft from its distribution, and the distribution on record.

A batch of temperature 0 only draws the most likely tokens; of a distribution that is certain one
number is written. A draft's distribution is on record only where the draft is put forward: the rest
stays as it was, zeros if they are read (`RoundInputs.empty_probs`).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, Key

from jspec.common.typing import DraftProbs, RowFlags, RowTokens
from jspec.kernels import run_if
from jspec.sampling.distribution import best_token, confidence, likeliest, sample, sampling_probs
from jspec.sampling.noise import gumbel_noise
from jspec.sampling.settings import SamplingSettings

DrawFn = Callable[
    [Float32[Array, "b v"], SamplingSettings, Key[Array, "b"]],
    tuple[RowTokens, Float32[Array, "b v"]],
]


def draw_from_distribution(
    logits: Float32[Array, "b v"], settings: SamplingSettings, rng_keys: Key[Array, "b"]
) -> tuple[RowTokens, Float32[Array, "b v"]]:
    """Draws one token a row; returns it with its distribution. The keys are consumed."""
    # `sampling_probs` works on [b t v]; t is 1 here.
    probs = sampling_probs(logits[:, None], settings)[:, 0]
    noise = gumbel_noise(rng_keys, probs.shape[-1], settings.is_random)
    return sample(probs, noise), probs


class Drawing(NamedTuple):
    """How the drafts of a chain are drawn."""

    vocab_size: int  # width of the distributions
    ids: Int32[Array, "u"] | None  # of the tokens that the logits are of; None for the first ones
    min_confidence: float  # a draft is put forward where its distribution is at least this sure
    draw: DrawFn


class Drawn(NamedTuple):
    """One more draft of each row."""

    token: RowTokens
    is_meant: RowFlags  # rows that put it forward
    probs: DraftProbs  # the chain's


def draw_one(
    drawing: Drawing,
    logits: Float32[Array, "b u"],
    settings: SamplingSettings,
    rng_keys: Key[Array, "b w"],
    index: Int32[Array, ""],
    is_going: RowFlags,
    probs: DraftProbs,
) -> Drawn:
    """Draws draft `index` of the rows that are going; `probs` elsewhere is kept."""
    # Of as many numbers in either way: a row's choice does not depend on its neighbours.
    likely = likeliest(logits[:, None]) if drawing.min_confidence > 0 else None

    def is_meant(token: RowTokens, distribution: Float32[Array, "b v"]) -> RowFlags:
        meant = is_going & (token >= 0)  # NO_TOKEN comes from no distribution only
        if likely is not None:
            sureness = confidence(likely, distribution[:, None], settings)[:, 0]
            meant &= sureness >= drawing.min_confidence
        return meant

    def by_distribution(drawn: Drawn) -> Drawn:
        # `index` is traced, so that a Python slice is impossible.
        keys = jax.lax.dynamic_index_in_dim(rng_keys, index, axis=1, keepdims=False)
        token, distribution = drawing.draw(
            spread(logits, drawing.ids, drawing.vocab_size), settings, keys
        )
        meant = is_meant(token, distribution)
        # A draft that is not put forward leaves no distribution on record.
        distribution = jnp.where(meant[:, None], distribution, 0.0)
        return Drawn(token, meant, drawn.probs.at[:, index].set(distribution))

    def by_best() -> Drawn:
        # At temperature 0 nothing is drawn, and one number records the distribution.
        token = best_token(logits)
        if drawing.ids is not None:
            # From the head's own vocabulary to the target's ids.
            token = jnp.where(token >= 0, drawing.ids[token], token)
        # Without temperature `confidence` needs no probabilities, only the likeliest token's.
        meant = is_meant(token, jnp.ones_like(logits))
        place = jnp.arange(token.shape[0]), index, token
        # A stopped row writes 0: its record stays empty.
        certain = probs.at[place].set(meant.astype(jnp.float32))
        return Drawn(token, meant, certain)

    # Processors change the logits, so that the best raw token need not be the choice.
    if drawing.draw is draw_from_distribution and not settings.switches.processors:
        return run_if(settings.is_random, by_distribution, by_best())
    nothing = jnp.zeros_like(is_going, jnp.int32)
    return by_distribution(Drawn(nothing, is_going, probs))


def spread(
    logits: Float32[Array, "*b u"], ids: Int32[Array, "u"] | None, vocab_size: int
) -> Float32[Array, "*b v"]:
    """Returns logits of all tokens, -inf of those that there are none of.

    The logits are those of the tokens `ids`, or of the first ones.
    """
    if ids is not None:
        none = jnp.full([*logits.shape[:-1], vocab_size], -jnp.inf, jnp.float32)
        return none.at[..., ids].set(logits)
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, vocab_size - logits.shape[-1])]
    return jnp.pad(logits, padding, constant_values=-jnp.inf)

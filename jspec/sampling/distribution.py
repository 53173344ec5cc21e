"""Logits to the distribution that tokens are really drawn from, and draws from it.

Speculative decoding is exact only if the acceptance rule is told the very distribution that a draft
was drawn from. So draft and target go through the same function, in float32 and in the same order:
the processors (`jspec.sampling.pipeline`), then temperature, then top-k, top-p and min-p, which is
the order of transformers.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jspec.common.typing import Logits, Probs
from jspec.kernels import first_argmax
from jspec.sampling.filters import min_p_mask, top_k_mask, top_p_mask
from jspec.sampling.settings import COLDEST, SamplingSettings

NO_TOKEN = -1  # what is drawn from a distribution that is none; never a token of a vocabulary


def sampling_probs(logits: Logits, settings: SamplingSettings) -> Probs:
    """Returns the distribution that tokens are drawn from, [b t v]; with processors t is 1.

    A probability is exactly 0 for a token that is never drawn.
    """
    if settings.switches.processors:
        (position,) = jnp.unstack(logits, axis=1)
        logits = settings.process(position)[:, None]
        settings = settings.without_processors()
    return jax.lax.cond(settings.is_random, _filtered_probs, _greedy_probs, logits, settings)


def _greedy_probs(logits: Logits, settings: SamplingSettings) -> Probs:
    """Returns one-hot distributions; a batch whose temperatures are all 0 needs no others."""
    del settings
    return jax.nn.one_hot(best_token(logits), logits.shape[-1], dtype=jnp.float32)


def _filtered_probs(logits: Logits, settings: SamplingSettings) -> Probs:
    """Returns every row's distribution, one-hot for rows of temperature 0."""
    rows = jax.tree.map(lambda leaf: leaf[:, None, None], settings)
    is_greedy = rows.temperature < COLDEST
    one_hot = _greedy_probs(logits, settings)
    # Relative to the best one, so that a temperature near 0 makes the others -inf and none inf.
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    logits = logits / jnp.where(is_greedy, 1.0, rows.temperature)
    switches = settings.switches
    if switches.top_k:
        logits = jnp.where(top_k_mask(logits, rows.top_k), logits, -jnp.inf)
    if switches.top_p:
        logits = jnp.where(top_p_mask(logits, rows.top_p), logits, -jnp.inf)
    if switches.min_p:
        logits = jnp.where(min_p_mask(logits, rows.min_p), logits, -jnp.inf)
    return jnp.where(is_greedy, one_hot, jax.nn.softmax(logits, axis=-1))


def likeliest(logits: Logits) -> Float32[Array, "b t"]:
    """Returns the probability of the most likely token at temperature 1."""
    return jnp.max(jax.nn.softmax(logits, axis=-1), axis=-1)


def confidence(
    likely: Float32[Array, "b t"], probs: Probs, settings: SamplingSettings
) -> Float32[Array, "b t"]:
    """Returns the probability of each distribution's most likely token.

    At temperature 0 that is always 1 and says nothing. There it is the probability at temperature
    1 instead: `likely`, the `likeliest` of the logits before the processors.
    """
    is_greedy = settings.temperature[:, None] < COLDEST
    return jnp.where(is_greedy, likely, jnp.max(probs, axis=-1))


def sample(probs: Float32[Array, "... v"], gumbel: Float32[Array, "... v"]) -> Int32[Array, "..."]:
    """Draws from each distribution by the Gumbel-max trick: argmax(log(probs) + noise).

    Distributions need not be normalised. A token of probability 0 is never drawn. The result is
    `NO_TOKEN` where a row is no distribution: NaN somewhere, or 0 everywhere.
    """
    best, score = first_argmax(jnp.log(probs) + gumbel)
    return jnp.where(score > -jnp.inf, best, NO_TOKEN)


def best_token(logits: Float32[Array, "... v"]) -> Int32[Array, "..."]:
    """Returns the most likely token, the first one of equals: what temperature 0 draws.

    Logits and probabilities serve alike. `NO_TOKEN` where a row has NaN, or is -inf everywhere.
    """
    best, highest = first_argmax(logits)
    return jnp.where(jnp.isfinite(highest), best, NO_TOKEN)

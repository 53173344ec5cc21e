"""Logits to the distribution that tokens are really drawn from, and draws from it.

Speculative decoding is exact only if the acceptance rule is told the very distribution that a draft
was drawn from. So draft and target go through the same function, in float32 and in the same order:
the processors (`sampling.settings`), then temperature, then top-k, top-p and min-p, as in
transformers.

No filter sorts the vocabulary. Each keeps the tokens whose logits are at or above a threshold,
and tokens that tie with the last one kept are kept too. So a mask depends on the logits alone, and
never on the order in which equal ones are met.

Of split logits top-k marks a device's own part. The threshold comes from the largest of each part,
which are enough unless a row keeps more than `MOST_OF_A_PART`; then it comes from all.

Log-probabilities, of emitted tokens and of the likeliest ones, are the target's.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.typing import AnyLogits, Logits, Probs, RowCounts, RowSeeds, RowTokens
from jspec.kernels import (
    SplitLogits,
    first_largest,
    own_part,
    own_part_of,
    smallest_rank,
    whole,
    with_own_part,
)
from jspec.sampling.noise import plain_noise
from jspec.sampling.settings import COLDEST, SamplingSettings

MOST_OF_A_PART = 64
_ABOVE_ZERO = float(jnp.finfo(jnp.float32).tiny)


def top_k_mask(logits: AnyLogits, top_k: Int32[Array, "b 1 1"]) -> Bool[Array, "b t u"]:
    """Marks the `top_k` largest logits and their ties; all of them where `top_k` is 0."""

    def threshold(logits: Logits) -> Int32[Array, "b t 1"]:
        counts = jnp.ones_like(logits)  # float32 counts exactly up to 2^24, beyond any vocabulary
        return smallest_rank(_rank(logits), counts, top_k.astype(jnp.float32))

    if isinstance(logits, SplitLogits):
        count = min(MOST_OF_A_PART, logits.part.shape[-1])

        def of_largest(logits: SplitLogits) -> Int32[Array, "b t 1"]:
            return threshold(whole(logits.replace(part=jax.lax.top_k(logits.part, count)[0])))

        def of_all(logits: SplitLogits) -> Int32[Array, "b t 1"]:
            return threshold(whole(logits))

        last = jax.lax.cond((top_k <= count).all(), of_largest, of_all, logits)
    else:
        last = threshold(logits)
    return (_rank(own_part(logits)) <= last) | (top_k <= 0)


def top_p_mask(logits: Logits, top_p: Float32[Array, "b 1 1"]) -> Bool[Array, "b t v"]:
    """Marks the fewest most likely tokens that together reach `top_p`, and their ties."""
    rank = _rank(logits)
    reached = jnp.maximum(top_p, _ABOVE_ZERO)  # the empty set is never enough
    return (rank <= smallest_rank(rank, jax.nn.softmax(logits), reached)) | (top_p >= 1)


def min_p_mask(logits: Logits, min_p: Float32[Array, "b 1 1"]) -> Bool[Array, "b t v"]:
    """Marks the tokens at least `min_p` times as likely as the best, whose logit is 0."""
    return logits >= jnp.log(min_p)


def _rank(logits: Logits) -> Int32[Array, "b t v"]:
    """Returns integers that fall as the logits grow, one for each float."""
    # From the bits, not from a difference or a softmax: XLA computes those anew wherever they are
    # used, may fuse a multiplication into them in one place and not in another, and a token on the
    # threshold would be cut off.
    bits = jax.lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits), jnp.int32)
    # Floats compare like integers of sign and magnitude; this makes two's complement of them.
    return ~jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


NO_TOKEN = -1  # what is drawn from a distribution that is none; never a token of a vocabulary


def sampling_probs(logits: AnyLogits, settings: SamplingSettings) -> AnyLogits:
    """Returns the distribution that tokens are drawn from, [b t v]; with processors t is 1.

    A probability is exactly 0 for a token that is never drawn. Of split logits, which no processor
    is to see, each device has its part, and it is not normalised: `sample` draws from it. Top-p
    needs all, and makes it whole.
    """
    if settings.switches.top_p:
        logits = whole(logits)
    if settings.switches.processors:
        (position,) = jnp.unstack(logits, axis=1)
        logits = settings.process(position)[:, None]
        settings = settings.without_processors()
    return jax.lax.cond(settings.is_random, _filtered_probs, _greedy_probs, logits, settings)


def _greedy_probs(logits: AnyLogits, settings: SamplingSettings) -> AnyLogits:
    """Returns one-hot distributions; a batch whose temperatures are all 0 needs no others."""
    del settings
    return _one_hot(best_token(logits), logits)


def _one_hot(tokens: Int32[Array, "b t"], logits: AnyLogits) -> AnyLogits:
    ids = own_part_of(jnp.arange(logits.shape[-1]), logits)
    return with_own_part(logits, (ids == tokens[..., None]).astype(jnp.float32))


def _filtered_probs(logits: AnyLogits, settings: SamplingSettings) -> AnyLogits:
    """Returns every row's distribution, one-hot for rows of temperature 0."""
    rows = jax.tree.map(lambda leaf: leaf[:, None, None], settings)
    is_greedy = rows.temperature < COLDEST
    best, highest = _best_of(logits)
    one_hot = own_part(_one_hot(best, logits))
    # Relative to the best, so that a temperature near 0 makes the others -inf and none inf.
    part = own_part(logits) - highest[..., None]
    part = part / jnp.where(is_greedy, 1.0, rows.temperature)
    switches = settings.switches
    if switches.top_k or switches.top_p:
        # Stored, not computed anew for the mask, with a multiplication of the processors fused into
        # a subtraction: the last token kept must equal the threshold.
        part = jax.lax.optimization_barrier(part)
    if switches.top_k:
        is_kept = top_k_mask(with_own_part(logits, part), rows.top_k)
        part = jnp.where(is_kept, part, -jnp.inf)
    if switches.top_p:
        part = jnp.where(top_p_mask(part, rows.top_p), part, -jnp.inf)
    if switches.min_p:
        part = jnp.where(min_p_mask(part, rows.min_p), part, -jnp.inf)
    is_split = isinstance(logits, SplitLogits)
    probs = jnp.exp(part) if is_split else jax.nn.softmax(part, axis=-1)
    return with_own_part(logits, jnp.where(is_greedy, one_hot, probs))


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


def sample(probs: AnyLogits, gumbel: Float32[Array, "... v"]) -> Int32[Array, "..."]:
    """Draws from each distribution by the Gumbel-max trick: argmax(log(probs) + noise).

    Distributions need not be normalised. A token of probability 0 is never drawn. The result is
    `NO_TOKEN` where a row is no distribution: NaN somewhere, or 0 everywhere.
    """
    scores = jnp.log(own_part(probs)) + own_part_of(gumbel, probs)
    best, score = first_largest(with_own_part(probs, scores))
    return jnp.where(score > -jnp.inf, best, NO_TOKEN)


def best_token(logits: AnyLogits) -> Int32[Array, "..."]:
    """Returns the most likely token, the first one of equals: what temperature 0 draws.

    Logits and probabilities serve alike. `NO_TOKEN` where a row has NaN, or is -inf everywhere.
    """
    return _best_of(logits)[0]


def _best_of(logits: AnyLogits) -> tuple[Int32[Array, "..."], Float32[Array, "..."]]:
    best, highest = first_largest(logits)
    return jnp.where(jnp.isfinite(highest), best, NO_TOKEN), highest


def best_tokens(logits: Logits, count: int) -> Int32[Array, "b t k"]:
    """Returns the `count` most likely tokens, the likeliest first; `NO_TOKEN` where no more are."""
    ids, tokens = jnp.arange(logits.shape[-1], dtype=jnp.int32), []
    for _ in range(count):
        tokens.append(best_token(logits))
        logits = jnp.where(ids == tokens[-1][..., None], -jnp.inf, logits)
    return jnp.stack(tokens, axis=-1)


MOST_TOP = 20


class TokenLogprobs(struct.PyTreeNode):
    """Natural logarithms of the probabilities of tokens [b t], each given all before it.

    Attributes:
      raw: under the model itself, softmax(logits), [b t].
      processed: under the distribution that was sampled from, after processors, temperature and
        filters, [b t]; 0 at temperature 0, whose distribution is one-hot. The lossy rule
        `lenient_argmax` judges by the distribution at temperature 1, and this is that one's.
      top_ids: the likeliest tokens there under the model itself, the likeliest first, [b t k]; -1
        in a round in which no row asks for them. None where they are not compiled in.
      top: their raw log-probabilities, [b t k].
    """

    raw: Float32[Array, "b t"]
    processed: Float32[Array, "b t"]
    top_ids: Int32[Array, "b t k"] | None = None
    top: Float32[Array, "b t k"] | None = None


def token_logprobs(
    logits: Logits, probs: Probs, tokens: Int32[Array, "b t"], settings: SamplingSettings
) -> TokenLogprobs:
    """Returns the log-probabilities of tokens, each with the target's unprocessed logits at its
    position and the distribution that was sampled from there.
    """
    # log softmax of one token a position: the whole [b t v] of logarithms is never made.
    index = tokens[..., None]
    raw = jnp.take_along_axis(logits, index, axis=-1)[..., 0]
    processed = jnp.take_along_axis(probs, index, axis=-1)[..., 0]
    total = jax.nn.logsumexp(logits, axis=-1)
    logprobs = TokenLogprobs(raw - total, jnp.log(processed))
    if not settings.switches.top_logprobs:
        return logprobs
    shape = *tokens.shape, min(MOST_TOP, logits.shape[-1])

    def top() -> tuple[Array, Array]:
        best, ids = jax.lax.top_k(logits, shape[-1])
        return ids, best - total[..., None]

    def none() -> tuple[Array, Array]:
        return jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.float32)

    assert settings.wants_top is not None
    # Half a millisecond a row: only where somebody asks.
    ids, best = jax.lax.cond(settings.wants_top.any(), top, none)
    return logprobs.replace(top_ids=ids, top=best)


def draw_next(
    logits: AnyLogits, settings: SamplingSettings, seed: RowSeeds, position: RowCounts
) -> tuple[RowTokens, Probs | None]:
    """Draws each row's next token as plain decoding does.

    The logits [b v] are those before the processors; see `speculation.round.as_read`.

    The token's position, counted from the start of the prompt, keys the noise. Where
    log-probabilities are wanted, the tokens' distributions [b 1 v] are returned too.
    """
    logits, settings = settings.process(logits), settings.without_processors()
    has_logprobs = settings.switches.logprobs

    def by_distribution() -> tuple[RowTokens, Probs | None]:
        probs = sampling_probs(logits[:, None], settings)
        noise = plain_noise(seed, position, probs.shape[-1], settings.is_random)
        return sample(probs[:, 0], noise), probs if has_logprobs else None

    def by_best() -> tuple[RowTokens, Probs | None]:
        probs = sampling_probs(logits[:, None], settings) if has_logprobs else None
        return best_token(logits), probs

    # Where all temperatures are 0, no distribution over the vocabulary need be computed.
    return jax.lax.cond(settings.is_random, by_distribution, by_best)

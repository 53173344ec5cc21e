"""Log-probabilities of emitted tokens, and of the likeliest ones, under the target."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float32, Int32

from jspec.common.typing import Logits, Probs
from jspec.sampling.settings import SamplingSettings

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
    # log softmax of one token each: the whole [b t v] of logarithms is never made.
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

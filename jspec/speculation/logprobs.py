"""Log-probabilities of emitted tokens under the target."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float32, Int32

from jspec.common.typing import Logits, Probs


class TokenLogprobs(struct.PyTreeNode):
    """Natural logarithms of the probabilities of tokens [b t], each given all before it.

    Attributes:
      raw: under the model itself, softmax(logits), [b t].
      processed: under the distribution that was sampled from, after processors, temperature and
        filters, [b t]; 0 at temperature 0, whose distribution is one-hot. The lossy rule
        `lenient_argmax` judges by the distribution at temperature 1, and this is that one's.
    """

    raw: Float32[Array, "b t"]
    processed: Float32[Array, "b t"]


def token_logprobs(logits: Logits, probs: Probs, tokens: Int32[Array, "b t"]) -> TokenLogprobs:
    """Returns the log-probabilities of tokens, each with the target's unprocessed logits at its
    position and the distribution that was sampled from there.
    """
    # log softmax of one token each: the whole [b t v] of logarithms is never made.
    index = tokens[..., None]
    raw = jnp.take_along_axis(logits, index, axis=-1)[..., 0]
    processed = jnp.take_along_axis(probs, index, axis=-1)[..., 0]
    return TokenLogprobs(raw - jax.nn.logsumexp(logits, axis=-1), jnp.log(processed))

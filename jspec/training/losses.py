"""What a draft's distribution can be trained for, place by place: pure functions of logits.

With p the target's distribution, q the draft's and x the text's next token:

    cross_entropy     -log q(x)                 on texts that the target wrote: to say the same
    kl                sum p log(p / q)          to believe the same of every token
    total_variation   1 - sum min(p, q)         one minus the probability that a draft is kept
                                                (arXiv 2211.17192, section 3.3 and section 6)
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from jspec.common.typing import Logits, Tokens

PlaceLoss: TypeAlias = Callable[[Logits, Logits, Tokens], Float32[Array, "b t"]]


def cross_entropy(
    draft_logits: Logits, target_logits: Logits, tokens: Tokens
) -> Float32[Array, "b t"]:
    """Returns -log q(token) in nats, [b t]; the target's distribution does not matter.

    Args:
      draft_logits: [b t v].
      target_logits: [b t v].
      tokens: what came next, [b t].
    """
    del target_logits
    distributions = jax.nn.log_softmax(draft_logits)
    return -jnp.take_along_axis(distributions, tokens[..., None], axis=-1)[..., 0]


def kl(draft_logits: Logits, target_logits: Logits, tokens: Tokens) -> Float32[Array, "b t"]:
    """Returns the Kullback-Leibler divergence KL(p | q) in nats, [b t]; see `cross_entropy`."""
    del tokens
    draft, target = jax.nn.log_softmax(draft_logits), jax.nn.log_softmax(target_logits)
    return jnp.sum(jnp.exp(target) * (target - draft), axis=-1)


def total_variation(
    draft_logits: Logits, target_logits: Logits, tokens: Tokens
) -> Float32[Array, "b t"]:
    """Returns the total variation between p and q, from 0 to 1, [b t]; see `cross_entropy`.

    Its gradient vanishes where the two distributions share nothing: begin with `kl`.
    """
    del tokens
    return 1 - overlap(draft_logits, target_logits)


def overlap(draft_logits: Logits, target_logits: Logits) -> Float32[Array, "b t"]:
    """Returns sum min(p, q), the probability that a draft is kept at temperature 1, [b t]."""
    draft, target = jax.nn.softmax(draft_logits), jax.nn.softmax(target_logits)
    return jnp.sum(jnp.minimum(draft, target), axis=-1)


LOSSES: Mapping[str, PlaceLoss] = {
    "cross_entropy": cross_entropy,
    "kl": kl,
    "total_variation": total_variation,
}

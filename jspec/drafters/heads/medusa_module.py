"""The heads of Medusa (arXiv 2401.10774): each predicts one later token from the last hidden state.

    normed output of the last layer at token i  -- the target's own head -->  probs of token i + 1
                                                -- head 0 -->                 probs of token i + 2
                                                -- head 1 -->                 probs of token i + 3

A head is residual blocks x + silu(W x + b), and then a head over the vocabulary of its own. None
sees the others' predictions.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jspec.common.typing import Params
from jspec.drafters.heads.head_format import HeadSizes
from jspec.models.layers import linear


@dataclasses.dataclass(frozen=True)
class MedusaConfig(HeadSizes):
    """Everything that decides the computation of the heads.

    Attributes:
      embed_dim: width of the target's residual stream.
      vocab_size: of the target.
      num_heads: how many there are.
      num_layers: residual blocks of each.
    """

    embed_dim: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1


def medusa_logits(
    config: MedusaConfig, params: Params, hidden: Float[Array, "b t d"]
) -> Float32[Array, "b t v"]:
    """Returns one head's logits.

    Args:
      config: of the heads.
      params: of this one.
      hidden: the target's last hidden states, normed, [b t d].
    """
    # Residual sums in float32, whatever the weights' type.
    x = hidden.astype(jnp.float32)
    for layer in range(config.num_layers):
        block = params[f"layer_{layer}"]
        x = x + jax.nn.silu(linear(x, block["kernel"]) + block["bias"].astype(jnp.float32))
    return linear(x, params["head"])


def init_medusa_params(config: MedusaConfig, head: Float[Array, "v d"]) -> dict[str, Any]:
    """Returns heads that all predict what the target's own head predicts of the next token.

    Their residual blocks add nothing, and are free to learn.

    Args:
      config: of the heads.
      head: the target's own.

    Returns:
      `head_0`, `head_1`, ..., each with `layer_0`, ... (`kernel` [d d], `bias` [d]) and
      `head` [v d]; float32.
    """
    d = config.embed_dim

    def one_head() -> dict[str, Any]:
        blocks = {
            f"layer_{layer}": {"kernel": jnp.zeros([d, d]), "bias": jnp.zeros([d])}
            for layer in range(config.num_layers)
        }
        # Each head has a vocabulary matrix of its own, which begins as the target's.
        return blocks | {"head": head.astype(jnp.float32)}

    return {f"head_{index}": one_head() for index in range(config.num_heads)}

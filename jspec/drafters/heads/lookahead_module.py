"""Look-ahead embeddings (PaSS, arXiv 2311.13581): inputs at which a model predicts later tokens.

    inputs    | ... tn | last | [LA 0] | [LA 1] | [LA 2]
    logits of |          d1   |   d2   |   d3   |   d4       in one call of the model as it is

They take the positions of tokens that are not known yet; nothing else is trained.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.drafters.heads.head_format import HeadSizes
from jspec.models.layers import Kernel, look_up


@dataclasses.dataclass(frozen=True)
class LookaheadConfig(HeadSizes):
    """How many embeddings there are, and how wide they are.

    Attributes:
      embed_dim: width of the target's residual stream.
      num_tokens: of them; with the target's own next token, drafts are one more.
    """

    embed_dim: int
    num_tokens: int


def embed_block(
    table: Kernel, params: Any, last_token: Array, num_ahead: int
) -> Float[Array, "b t d"]:
    """Returns the inputs of a call that looks ahead, [b 1+num_ahead d], float32.

    Args:
      table: the target's embedding.
      params: `embeddings` [l d].
      last_token: the newest token of each row, [b].
      num_ahead: how many of the embeddings follow it.
    """
    last = look_up(table, last_token[:, None]).astype(jnp.float32)
    later = params["embeddings"][:num_ahead].astype(jnp.float32)
    # The same embeddings for every row: they stand for positions, not for texts.
    later = jnp.broadcast_to(later, (last.shape[0], *later.shape))
    return jnp.concatenate([last, later], axis=1)


def init_lookahead_params(
    config: LookaheadConfig, table: Float[Array, "v d"], rng_key: Array
) -> dict[str, Any]:
    """Returns embeddings as large as a model's own, without a meaning yet; the key is consumed.

    Args:
      config: their shape.
      table: the model's embedding.
      rng_key: of the draw.
    """
    # Inputs of another size than the model's own would start training far off.
    scale = jnp.sqrt(jnp.mean(jnp.square(table.astype(jnp.float32))))
    shape = config.num_tokens, config.embed_dim
    return {"embeddings": scale * jax.random.normal(rng_key, shape)}

"""Look-ahead embeddings (PaSS, arXiv 2311.13581): inputs at which a model predicts later tokens.

    inputs    | ... tn | last | [LA 0] | [LA 1] | [LA 2]
    logits of |          d1   |   d2   |   d3   |   d4       in one call of the model as it is

They take the positions of tokens that are not known yet; nothing else is trained.

A folder holds

```
  config.json           lookahead_num_tokens (L), and the target's sizes
  model.safetensors
    embeddings.weight   [L, D], float32
```
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.drafters.heads.folder import HeadFormat, HeadSizes, load_head, save_head
from jspec.models.layers import Kernel, look_up
from jspec.weights.tensor_names import Parameter, one_tensor

_KEYS = {"num_tokens": "lookahead_num_tokens"}


@dataclasses.dataclass(frozen=True)
class LookaheadConfig(HeadSizes):
    """How many embeddings there are, and how wide they are.

    With the target's own next token, drafts are one more than `num_tokens`.
    """

    embed_dim: int
    num_tokens: int


def embed_block(
    table: Kernel, params: Any, last_token: Array, num_ahead: int
) -> Float[Array, "b t d"]:
    """Returns the inputs of a call that looks ahead, [b 1+num_ahead d], float32.

    These are the newest token of each row [b] in the target's embedding `table`, and the first of
    `params["embeddings"]`, [l d].
    """
    last = look_up(table, last_token[:, None]).astype(jnp.float32)
    later = params["embeddings"][:num_ahead].astype(jnp.float32)
    # The same embeddings for every row: they stand for positions, not for texts.
    later = jnp.broadcast_to(later, (last.shape[0], *later.shape))
    return jnp.concatenate([last, later], axis=1)


def init_lookahead_params(
    config: LookaheadConfig, table: Float[Array, "v d"], rng_key: Array
) -> dict[str, Any]:
    """Returns embeddings as large as those of `table`, without a meaning; the key is consumed."""
    # Inputs of another size than the model's own would start training far off.
    scale = jnp.sqrt(jnp.mean(jnp.square(table.astype(jnp.float32))))
    shape = config.num_tokens, config.embed_dim
    return {"embeddings": scale * jax.random.normal(rng_key, shape)}


def _rules(config: LookaheadConfig) -> list[Parameter]:
    shape = config.num_tokens, config.embed_dim
    return [one_tensor(("embeddings",), "embeddings.weight", shape)]


_FORMAT = HeadFormat(
    what="look-ahead embeddings",
    architecture="LookaheadEmbeddings",
    keys=_KEYS,
    read_config=lambda raw, target, _: LookaheadConfig(target.embed_dim, raw[_KEYS["num_tokens"]]),
    rules=_rules,
)
load_lookahead = functools.partial(load_head, _FORMAT)  # float32 whatever the target's type
save_lookahead = functools.partial(save_head, _FORMAT)

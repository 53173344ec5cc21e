"""The proposal heads of blockwise parallel decoding (Stern et al., arXiv 1811.03115, section 6).

    normed output of the last layer at token i  -- up, relu -->  inner [h·f]
    inner -- down of head 0, + the normed output -- the target's own head -->  token i + 2
    inner -- down of head 1, + the normed output -- the target's own head -->  token i + 3

One feed-forward layer of h times the width, h outputs, a residual connection to each, and the same
projection onto the vocabulary for all. (The paper's first output, for token i + 1, is left to the
target as it is.)

A folder holds

```
  config.json           blockwise_num_heads, blockwise_hidden_size (F), and the target's sizes
  model.safetensors
    up.weight           [H·F, D]   and up.bias [H·F]
    down.{i}.weight     [D, H·F]   and down.{i}.bias [D], of head i of H
```
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jspec.common.typing import Params
from jspec.drafters.heads.folder import HeadFormat, HeadSizes, load_head, save_head
from jspec.models.layers import linear
from jspec.weights.tensor_names import Parameter, one_tensor

_KEYS = {"num_heads": "blockwise_num_heads", "hidden_dim": "blockwise_hidden_size"}


@dataclasses.dataclass(frozen=True)
class BlockwiseConfig(HeadSizes):
    """The shape of the heads.

    Attributes:
      embed_dim: width of the target's residual stream, d.
      hidden_dim: inner width for each head, f.
      num_heads: positions ahead, h.
    """

    embed_dim: int
    hidden_dim: int
    num_heads: int


def inner_layer(params: Params, hidden: Float[Array, "b t d"]) -> Float32[Array, "b t f"]:
    """Returns what every head reads, [b t h·f], from the target's last hidden states, normed."""
    return jax.nn.relu(_affine(params["up"], hidden))


def place_output(
    params: Params, index: int, inner: Float32[Array, "b t f"], hidden: Float[Array, "b t d"]
) -> Float32[Array, "b t d"]:
    """Returns head `index`'s stand-in for the normed output at a later position.

    `inner` is that of `inner_layer`; the target's own head reads the result.
    """
    # The residual of the paper's section 6: the target's own head can read the sum.
    return hidden.astype(jnp.float32) + _affine(params[f"down_{index}"], inner)


def _affine(params: Params, inputs: Float[Array, "b t i"]) -> Float32[Array, "b t o"]:
    return linear(inputs, params["kernel"]) + params["bias"].astype(jnp.float32)


def init_blockwise_params(config: BlockwiseConfig, rng_key: Array) -> dict[str, Any]:
    """Returns heads that all predict what the target's own head predicts; the key is consumed.

    Returns:
      `up` and `down_0`, `down_1`, ..., each with `kernel` ([h·f d]; [d h·f]) and `bias`; float32.
    """
    # Zeros below: the heads begin as the target's own head.
    d, wide = config.embed_dim, config.num_heads * config.hidden_dim
    up = {"kernel": jax.random.normal(rng_key, (wide, d)) * d**-0.5, "bias": jnp.zeros([wide])}
    downs = {
        f"down_{index}": {"kernel": jnp.zeros([d, wide]), "bias": jnp.zeros([d])}
        for index in range(config.num_heads)
    }
    return {"up": up} | downs


def blockwise_rules(config: BlockwiseConfig) -> list[Parameter]:
    """Returns the table from the heads' tensors to their parameters."""
    d, wide = config.embed_dim, config.num_heads * config.hidden_dim
    rules = [
        one_tensor(("up", "kernel"), "up.weight", (wide, d)),
        one_tensor(("up", "bias"), "up.bias", (wide,)),
    ]
    for index in range(config.num_heads):
        path, name = f"down_{index}", f"down.{index}"
        rules.append(one_tensor((path, "kernel"), f"{name}.weight", (d, wide)))
        rules.append(one_tensor((path, "bias"), f"{name}.bias", (d,)))
    return rules


_FORMAT = HeadFormat(
    what="heads of blockwise decoding",
    architecture="BlockwiseHeads",
    keys=_KEYS,
    read_config=lambda raw, target, _: BlockwiseConfig(
        target.embed_dim, raw.get(_KEYS["hidden_dim"], 0), raw[_KEYS["num_heads"]]
    ),
    rules=blockwise_rules,
)
load_blockwise = functools.partial(load_head, _FORMAT)
save_blockwise = functools.partial(save_head, _FORMAT)

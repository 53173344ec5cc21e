"""The proposal heads of blockwise parallel decoding (Stern et al., arXiv 1811.03115, section 6).

    normed output of the last layer at token i  -- up, relu -->  inner [h·f]
    inner -- down of place 0, + the normed output -- the target's own head -->  token i + 2
    inner -- down of place 1, + the normed output -- the target's own head -->  token i + 3

One feed-forward layer of h times the width, h outputs, a residual connection to each, and the same
projection onto the vocabulary for all. (The paper's first output, for token i + 1, is left to the
target as it is.)
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from jspec.models.layers import linear
from jspec.typing import Params


@dataclasses.dataclass(frozen=True)
class BlockwiseConfig:
    """Everything that decides the computation of the heads.

    Attributes:
      embed_dim: width of the target's residual stream, d.
      hidden_dim: inner width for each place, f.
      num_heads: places ahead, h.
    """

    embed_dim: int
    hidden_dim: int
    num_heads: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise ValueError(f"expected {field.name} as a number of at least 1, got {value!r}")


def inner_layer(params: Params, hidden: Float[Array, "b t d"]) -> Float32[Array, "b t f"]:
    """Returns what all places are read from, [b t h·f].

    Args:
      params: of the heads.
      hidden: the target's last hidden states, normed, [b t d].
    """
    outputs = linear(hidden, params["up"]) + params["up_bias"].astype(jnp.float32)
    return jax.nn.relu(outputs)


def place_output(
    params: Params,
    inner: Float32[Array, "b t f"],
    hidden: Float[Array, "b t d"],
    index: Int[Array, ""] | int,
) -> Float32[Array, "b t d"]:
    """Returns what stands for the normed output at one place ahead; the target's head reads it.

    Args:
      params: of the heads.
      inner: of `inner_layer`.
      hidden: the target's last hidden states, normed.
      index: which place.
    """
    kernel, bias = params["down"][index], params["down_bias"][index]
    return hidden + linear(inner, kernel) + bias.astype(jnp.float32)


def init_blockwise_params(config: BlockwiseConfig, rng_key: Array) -> dict[str, Any]:
    """Returns heads that all say what the target's own head says; the key is consumed.

    Returns:
      `up` [h·f d], `up_bias` [h·f], `down` [h d h·f], `down_bias` [h d]; float32.
    """
    d, h = config.embed_dim, config.num_heads
    inner = h * config.hidden_dim
    return {
        "up": jax.random.normal(rng_key, (inner, d)) * d**-0.5,
        "up_bias": jnp.zeros([inner]),
        "down": jnp.zeros([h, d, inner]),
        "down_bias": jnp.zeros([h, d]),
    }

"""The heads of Medusa (arXiv 2401.10774): each predicts one later token from the last hidden state.

    normed output of the last layer at token i  -- the target's own head -->  probs of token i + 1
                                                -- head 0 -->                 probs of token i + 2
                                                -- head 1 -->                 probs of token i + 3

A head is residual blocks x + silu(W x + b), and then a head over the vocabulary of its own. None
sees the others' predictions.

A folder holds, as published ones do,

```
  config.json                medusa_num_heads, medusa_num_layers
  medusa_lm_head.safetensors
    {i}.{j}.linear.weight    [D, D]   residual block j of head i
    {i}.{j}.linear.bias      [D]
    {i}.{n}.weight           [V, D]   its head; n is the number of its blocks
```
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from jspec.common.typing import Params
from jspec.drafters.heads.folder import HeadFormat, HeadSizes, load_head, save_head
from jspec.models.config import DecoderConfig
from jspec.models.layers import linear
from jspec.weights.tensor_names import Parameter, one_tensor

_KEYS = {"num_heads": "medusa_num_heads", "num_layers": "medusa_num_layers"}


@dataclasses.dataclass(frozen=True)
class MedusaConfig(HeadSizes):
    """The shape of the heads.

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
    """Returns one head's logits from the target's last hidden states, normed."""
    # Residual sums in float32, whatever the weights' type.
    x = hidden.astype(jnp.float32)
    for layer in range(config.num_layers):
        block = params[f"layer_{layer}"]
        x = x + jax.nn.silu(linear(x, block["kernel"]) + block["bias"].astype(jnp.float32))
    return linear(x, params["head"])


def init_medusa_params(config: MedusaConfig, head: Float[Array, "v d"]) -> dict[str, Any]:
    """Returns heads that all predict what the target's own head predicts of the next token.

    They are `head_0`, `head_1`, ..., each with `layer_0`, ... (`kernel` [d d], `bias` [d]), which
    add nothing and are free to learn, and `head` [v d], the target's own; float32.
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


def medusa_rules(config: MedusaConfig) -> list[Parameter]:
    """Returns the table from the heads' tensors to their parameters."""
    d, rules = config.embed_dim, []
    for index in range(config.num_heads):
        head = f"head_{index}"
        for layer in range(config.num_layers):
            block, name = (head, f"layer_{layer}"), f"{index}.{layer}.linear"
            rules.append(one_tensor((*block, "kernel"), f"{name}.weight", (d, d)))
            rules.append(one_tensor((*block, "bias"), f"{name}.bias", (d,)))
        name = f"{index}.{config.num_layers}.weight"
        rules.append(one_tensor((head, "head"), name, (config.vocab_size, d)))
    return rules


def _read_config(
    raw: dict[str, Any], target: DecoderConfig, tensors: Mapping[str, np.ndarray]
) -> MedusaConfig:
    num_heads, num_layers = raw[_KEYS["num_heads"]], raw.get(_KEYS["num_layers"], 1)
    if type(num_heads) is int:
        # Published folders may hold more heads than their config.json says: all are taken.
        num_heads = max(num_heads, len({name.partition(".")[0] for name in tensors}))
    return MedusaConfig(target.embed_dim, target.vocab_size, num_heads, num_layers)


def _sizes(config: MedusaConfig, tensors: Mapping[str, np.ndarray]) -> list[tuple[str, Any, int]]:
    # What the first head's own shape says of the target, if it is there.
    head = tensors.get(f"0.{config.num_layers}.weight")
    if head is None or head.ndim != 2:
        return []
    vocab_size, width = head.shape
    return [("width", width, config.embed_dim), ("vocabulary", vocab_size, config.vocab_size)]


_FORMAT = HeadFormat(
    what="heads of Medusa",
    file="medusa_lm_head.safetensors",
    architecture="MedusaModel",
    keys=_KEYS,
    read_config=_read_config,
    rules=medusa_rules,
    sizes=_sizes,
)
load_medusa = functools.partial(load_head, _FORMAT)
save_medusa = functools.partial(save_head, _FORMAT)

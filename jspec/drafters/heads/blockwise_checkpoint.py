"""Folders with the heads of blockwise parallel decoding: config.json and safetensors.

```
  config.json           blockwise_num_heads, blockwise_hidden_size (F), and the target's sizes
  model.safetensors
    up.weight           [H·F, D]   and up.bias [H·F]
    down.{i}.weight     [D, H·F]   and down.{i}.bias [D], of head i of H
```
"""

import functools
from typing import Any

from jspec.drafters.heads.blockwise_module import BlockwiseConfig
from jspec.drafters.heads.head_format import HeadFormat, load_head, save_head
from jspec.models.config import LlamaConfig
from jspec.weights.tensor_names import Parameter, one_tensor

_KEYS = {"num_heads": "blockwise_num_heads", "hidden_dim": "blockwise_hidden_size"}


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


def _read_config(raw: dict[str, Any], target: LlamaConfig, tensors: object) -> BlockwiseConfig:
    del tensors
    hidden_dim = raw.get(_KEYS["hidden_dim"], 0)
    return BlockwiseConfig(target.embed_dim, hidden_dim, raw[_KEYS["num_heads"]])


_FORMAT = HeadFormat(
    what="heads of blockwise decoding",
    file="model.safetensors",
    architecture="BlockwiseHeads",
    keys=_KEYS,
    read_config=_read_config,
    rules=blockwise_rules,
)
load_blockwise = functools.partial(load_head, _FORMAT)
save_blockwise = functools.partial(save_head, _FORMAT)

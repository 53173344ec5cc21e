"""Folders with heads of Medusa: config.json and safetensors, in the layout of published ones.

```
  config.json                medusa_num_heads, medusa_num_layers
  medusa_lm_head.safetensors
    {i}.{j}.linear.weight    [D, D]   residual block j of head i
    {i}.{j}.linear.bias      [D]
    {i}.{n}.weight           [V, D]   its head; n is the number of its blocks
```
"""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec.drafters.heads.head_format import HeadFormat, load_head, save_head
from jspec.drafters.heads.medusa_module import MedusaConfig
from jspec.models.config import LlamaConfig
from jspec.weights.tensor_names import Parameter, one_tensor

_KEYS = {"num_heads": "medusa_num_heads", "num_layers": "medusa_num_layers"}


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
    raw: dict[str, Any], target: LlamaConfig, tensors: Mapping[str, np.ndarray]
) -> MedusaConfig:
    num_heads, num_layers = raw[_KEYS["num_heads"]], raw.get(_KEYS["num_layers"], 1)
    if type(num_heads) is int:
        # Published folders may hold more heads than their config.json says: all are taken.
        num_heads = max(num_heads, len({name.partition(".")[0] for name in tensors}))
    return MedusaConfig(target.embed_dim, target.vocab_size, num_heads, num_layers)


def _sizes_of_head(
    config: MedusaConfig, tensors: Mapping[str, np.ndarray]
) -> list[tuple[str, Any, int]]:
    """Returns what the first head's own shape says of the target, if it is there."""
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
    sizes=_sizes_of_head,
)
load_medusa = functools.partial(load_head, _FORMAT)
save_medusa = functools.partial(save_head, _FORMAT)

"""Folders with look-ahead embeddings: config.json and safetensors.

```
  config.json           lookahead_num_tokens (L), and the target's sizes
  model.safetensors
    embeddings.weight   [L, D], float32
```
"""

import functools
from typing import Any

from jspec.drafters.heads.head_format import HeadFormat, load_head, save_head
from jspec.drafters.heads.lookahead_module import LookaheadConfig
from jspec.models.config import LlamaConfig
from jspec.weights.tensor_names import Parameter, one_tensor

_KEYS = {"num_tokens": "lookahead_num_tokens"}


def _rules(config: LookaheadConfig) -> list[Parameter]:
    shape = config.num_tokens, config.embed_dim
    return [one_tensor(("embeddings",), "embeddings.weight", shape)]


def _read_config(raw: dict[str, Any], target: LlamaConfig, tensors: object) -> LookaheadConfig:
    del tensors
    return LookaheadConfig(target.embed_dim, raw[_KEYS["num_tokens"]])


_FORMAT = HeadFormat(
    what="look-ahead embeddings",
    file="model.safetensors",
    architecture="LookaheadEmbeddings",
    keys=_KEYS,
    read_config=_read_config,
    rules=_rules,
)
load_lookahead = functools.partial(load_head, _FORMAT)  # float32 whatever the target's type
save_lookahead = functools.partial(save_head, _FORMAT)

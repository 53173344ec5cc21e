"""Folders with look-ahead embeddings: config.json and safetensors.

```
  config.json           lookahead_num_tokens (L), and the target's sizes
  model.safetensors
    embeddings.weight   [L, D], float32
```
"""

import pathlib
from typing import Any, NamedTuple

from jspec.common.errors import InputError
from jspec.drafters.heads.folder import (
    HeadFile,
    check_target,
    pack_params,
    read_head_config,
    read_tensors,
    target_entries,
    target_sizes,
    unpack_params,
    write_head,
)
from jspec.drafters.heads.lookahead_module import LookaheadConfig
from jspec.models.config import LlamaConfig
from jspec.weights.tensor_names import Parameter, one_tensor

_TOKENS_KEY = "lookahead_num_tokens"
_FILE = HeadFile("look-ahead embeddings", "model.safetensors", _TOKENS_KEY)


class LoadedLookahead(NamedTuple):
    """Embeddings ready to run.

    Attributes:
      config: their shape.
      params: `embeddings` [l d], float32.
    """

    config: LookaheadConfig
    params: dict[str, Any]


def _rules(config: LookaheadConfig) -> list[Parameter]:
    shape = config.num_tokens, config.embed_dim
    return [one_tensor(("embeddings",), "embeddings.weight", shape)]


def load_lookahead(folder: pathlib.Path, target: LlamaConfig) -> LoadedLookahead:
    """Loads embeddings.

    Args:
      folder: with config.json and model.safetensors.
      target: the model that they were trained for.

    Raises:
      InputError: anything missing, damaged, of another shape, or of another target.
    """
    raw = read_head_config(folder, _FILE)
    check_target(folder, target_sizes(raw, target))
    try:
        config = LookaheadConfig(target.embed_dim, raw[_TOKENS_KEY])
    except ValueError as error:
        raise InputError(f"{folder / 'config.json'}: {error}") from None
    tensors = read_tensors(folder / _FILE.name)
    return LoadedLookahead(config, pack_params(folder, tensors, _rules(config), "float32"))


def save_lookahead(
    folder: pathlib.Path, config: LookaheadConfig, params: dict[str, Any], target: LlamaConfig
) -> None:
    """Writes embeddings; the folder appears when it is complete.

    Args:
      folder: the new one.
      config: their shape.
      params: `embeddings` [l d].
      target: the model that they were trained for.

    Raises:
      InputError: the folder exists or cannot be written.
    """
    text = target_entries(target) | {
        "architectures": ["LookaheadEmbeddings"],
        _TOKENS_KEY: config.num_tokens,
        "dtype": str(params["embeddings"].dtype),
    }
    write_head(folder, _FILE.name, unpack_params(_rules(config), params), text)

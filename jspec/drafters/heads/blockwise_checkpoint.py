"""Folders with the heads of blockwise parallel decoding: config.json and safetensors.

```
  config.json           blockwise_num_heads, blockwise_hidden_size (F), and the target's sizes
  model.safetensors
    up.weight           [H·F, D]   and up.bias [H·F]
    down.{i}.weight     [D, H·F]   and down.{i}.bias [D], of place i of H
```
"""

import pathlib
from typing import Any, NamedTuple

from jspec.common.errors import InputError
from jspec.drafters.heads.blockwise_module import BlockwiseConfig
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
from jspec.models.config import LlamaConfig
from jspec.weights.tensor_names import Parameter, one_tensor

_HEADS_KEY, _HIDDEN_KEY = "blockwise_num_heads", "blockwise_hidden_size"
_FILE = HeadFile("heads of blockwise decoding", "model.safetensors", _HEADS_KEY)


class LoadedBlockwise(NamedTuple):
    """Heads ready to run.

    Attributes:
      config: their shape.
      params: see `init_blockwise_params`.
    """

    config: BlockwiseConfig
    params: dict[str, Any]


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


def load_blockwise(folder: pathlib.Path, target: LlamaConfig, dtype: Any) -> LoadedBlockwise:
    """Loads heads.

    Args:
      folder: with config.json and model.safetensors.
      target: the model that they were trained for.
      dtype: bfloat16 or float32.

    Raises:
      InputError: anything missing, damaged, of another shape, or of another target.
    """
    raw = read_head_config(folder, _FILE)
    check_target(folder, target_sizes(raw, target))
    try:
        config = BlockwiseConfig(target.embed_dim, raw.get(_HIDDEN_KEY, 0), raw[_HEADS_KEY])
    except ValueError as error:
        raise InputError(f"{folder / 'config.json'}: {error}") from None
    tensors = read_tensors(folder / _FILE.name)
    return LoadedBlockwise(config, pack_params(folder, tensors, blockwise_rules(config), dtype))


def save_blockwise(
    folder: pathlib.Path, config: BlockwiseConfig, params: dict[str, Any], target: LlamaConfig
) -> None:
    """Writes heads; the folder appears when it is complete.

    Args:
      folder: the new one.
      config: of the heads.
      params: theirs.
      target: the model that they were trained for.

    Raises:
      InputError: the folder exists or cannot be written.
    """
    text = target_entries(target) | {
        "architectures": ["BlockwiseHeads"],
        _HEADS_KEY: config.num_heads,
        _HIDDEN_KEY: config.hidden_dim,
        "dtype": str(params["up"]["kernel"].dtype),
    }
    write_head(folder, _FILE.name, unpack_params(blockwise_rules(config), params), text)

"""Folders with heads of Medusa: config.json and safetensors, in the layout of published ones.

```
  config.json                medusa_num_heads, medusa_num_layers
  medusa_lm_head.safetensors
    {i}.{j}.linear.weight    [D, D]   residual block j of head i
    {i}.{j}.linear.bias      [D]
    {i}.{n}.weight           [V, D]   its head; n is the number of its blocks
```
"""

import pathlib
from typing import Any, NamedTuple

import numpy as np

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
from jspec.drafters.heads.medusa_module import MedusaConfig
from jspec.models.config import LlamaConfig
from jspec.weights.tensor_names import Parameter, one_tensor

_HEADS_KEY, _LAYERS_KEY = "medusa_num_heads", "medusa_num_layers"
_FILE = HeadFile("heads of Medusa", "medusa_lm_head.safetensors", _HEADS_KEY)


class LoadedMedusa(NamedTuple):
    """Heads ready to run.

    Attributes:
      config: their shape.
      params: see `init_medusa_params`.
    """

    config: MedusaConfig
    params: dict[str, Any]


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


def load_medusa(folder: pathlib.Path, target: LlamaConfig, dtype: Any) -> LoadedMedusa:
    """Loads heads.

    Published folders may hold more heads than their config.json says: all of them are taken.

    Args:
      folder: with config.json and medusa_lm_head.safetensors.
      target: the model that they were trained for.
      dtype: bfloat16 or float32.

    Raises:
      InputError: anything missing, damaged, of another shape, or of another target.
    """
    raw = read_head_config(folder, _FILE)
    tensors = read_tensors(folder / _FILE.name)
    num_found, num_heads = len({name.partition(".")[0] for name in tensors}), raw[_HEADS_KEY]
    if type(num_heads) is int:
        num_heads = max(num_heads, num_found)
    try:
        config = MedusaConfig(
            target.embed_dim, target.vocab_size, num_heads, raw.get(_LAYERS_KEY, 1)
        )
    except ValueError as error:
        raise InputError(f"{folder / 'config.json'}: {error}") from None
    check_target(folder, target_sizes(raw, target))
    check_target(folder, _sizes_of_head(tensors, config))
    return LoadedMedusa(config, pack_params(folder, tensors, medusa_rules(config), dtype))


def _sizes_of_head(
    tensors: dict[str, np.ndarray], config: MedusaConfig
) -> list[tuple[str, int, int]]:
    """Returns what the first head's own shape says of the target, if it is there."""
    head = tensors.get(f"0.{config.num_layers}.weight")
    if head is None or head.ndim != 2:
        return []
    vocab_size, width = head.shape
    return [("width", width, config.embed_dim), ("vocabulary", vocab_size, config.vocab_size)]


def save_medusa(
    folder: pathlib.Path,
    config: MedusaConfig,
    params: dict[str, Any],
    target: LlamaConfig,
    *,
    base_model: str | None = None,
) -> None:
    """Writes heads; the folder appears when it is complete.

    Args:
      folder: the new one.
      config: of the heads.
      params: theirs.
      target: the model that they were trained for.
      base_model: its name, for other programs that read such a folder.

    Raises:
      InputError: the folder exists or cannot be written.
    """
    tensors = unpack_params(medusa_rules(config), params)
    text = target_entries(target) | {
        "architectures": ["MedusaModel"],
        _HEADS_KEY: config.num_heads,
        _LAYERS_KEY: config.num_layers,
        "dtype": str(params["head_0"]["head"].dtype),
    }
    if base_model is not None:
        text["base_model_name_or_path"] = base_model
    write_head(folder, _FILE.name, tensors, text)

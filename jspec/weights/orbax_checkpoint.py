"""Orbax folders: jspec's own parameter tree, with config and tokenizer next to it.

```
  folder/config.json       in Hugging Face's spelling
  folder/params/           the arrays, as Orbax lays them out
  folder/tokenizer.json …  the tokenizer, if there is one
```
"""

import gc
import pathlib
import warnings
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from jspec.common.errors import InputError
from jspec.common.json_lines import save_json
from jspec.common.new_folder import new_folder
from jspec.models.config import LlamaConfig
from jspec.models.hf_config import to_hf_config
from jspec.weights.assemble import as_dtype, check_params, check_room
from jspec.weights.hf import read_config
from jspec.weights.quantize import check_kind, quantize_leaves, refuse_quantized
from jspec.weights.tensor_names import parameter_table
from jspec.weights.tokenizers.tokenizer import Tokenizer

_PARAMS = "params"


def save_orbax(
    folder: pathlib.Path,
    config: LlamaConfig,
    params: dict[str, Any],
    *,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Writes an Orbax folder; it appears when it is complete.

    Args:
      folder: must not exist, or be empty.
      config: the model's.
      params: its parameters, floats.
      tokenizer: written next to them.

    Raises:
      InputError: the folder exists or cannot be written, or the parameters are quantised.
      ValueError: the parameters do not fit the config.
    """
    from orbax.checkpoint import v1 as ocp

    refuse_quantized(params, folder)
    check_params(config, params)
    with new_folder(folder) as partial:
        ocp.save(str(partial / _PARAMS), params)
        save_json(partial / "config.json", to_hf_config(config))
        if tokenizer is not None:
            tokenizer.save(partial)


def load_orbax(
    folder: pathlib.Path, dtype: Any, quantization: str | None = None
) -> tuple[LlamaConfig, dict[str, Any]]:
    """Returns the config and the parameters of a folder that `save_orbax` wrote.

    Orbax reads all parameters at once. Kernels are then quantised from `dtype` one by one, and the
    floats of each are freed before the next.

    Args:
      folder: the folder.
      dtype: bfloat16 or float32; arrays are read into it.
      quantization: of the kernels; see `quantize.KINDS`.

    Raises:
      InputError: anything missing, damaged, unknown or of another shape.
    """
    from orbax.checkpoint import v1 as ocp

    config, dtype = read_config(folder), as_dtype(dtype)
    check_kind(config, quantization)
    check_room(config, dtype, None)  # all the floats are there before any is quantised
    path = str((folder / _PARAMS).absolute())
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        entry.path: jax.ShapeDtypeStruct(entry.shape, dtype, sharding=sharding)
        for entry in parameter_table(config)
    }
    try:
        check_params(config, ocp.metadata(path).metadata)
        leaves = flatten_dict(ocp.load(path, unflatten_dict(wanted)))
    except Exception as error:  # Orbax passes on what TensorStore and its own threads raise
        reason = " ".join(str(error).split())[:400]
    else:
        if quantization is not None:
            leaves = quantize_leaves(leaves, config, quantization)
        return config, unflatten_dict(leaves)
    with warnings.catch_warnings(action="ignore"):
        gc.collect()  # a failed load leaves coroutines, which warn when they are collected
    raise InputError(f"{path}: cannot be read as an Orbax checkpoint: {reason}")

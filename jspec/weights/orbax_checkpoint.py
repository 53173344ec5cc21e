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
from jspec.common.typing import Params
from jspec.models.config import DecoderConfig
from jspec.weights.assemble import as_dtype, check_params, check_room, make_params
from jspec.weights.hf import new_model_folder, read_config
from jspec.weights.quantize import check_kind
from jspec.weights.tensor_names import parameter_table
from jspec.weights.tokenizers.tokenizer import Tokenizer

PARAMS = "params"  # the subfolder that no other checkpoint has


def save_orbax(
    folder: pathlib.Path,
    config: DecoderConfig,
    params: Params,
    *,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Writes an Orbax folder of floats; see `new_model_folder`."""
    from orbax.checkpoint import v1 as ocp

    with new_model_folder(folder, config, params, tokenizer) as partial:
        ocp.save(str(partial / PARAMS), params)


def load_orbax(
    folder: pathlib.Path, dtype: Any, quantization: str | None = None
) -> tuple[DecoderConfig, Params]:
    """Returns the config and the parameters of a folder that `save_orbax` wrote.

    Orbax reads all parameters at once, in `dtype`. Kernels are then quantised from it one by one,
    and the floats of each are freed.

    Raises:
      InputError: anything missing, damaged, unknown or of another shape.
    """
    from orbax.checkpoint import v1 as ocp

    config, dtype = read_config(folder), as_dtype(dtype)
    check_kind(config, quantization)
    check_room(config, dtype, None)  # all the floats are there before any is quantised
    path = str((folder / PARAMS).absolute())
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    try:
        stored = ocp.metadata(path).metadata
        check_params(config, stored)
        wanted = {
            entry.path: jax.ShapeDtypeStruct(entry.shape, entry.dtype_in(dtype), sharding=sharding)
            for entry in parameter_table(config)
        }
        leaves = flatten_dict(ocp.load(path, unflatten_dict(wanted)))
    except Exception as error:  # Orbax passes on what TensorStore and its own threads raise
        reason = " ".join(str(error).split())[:400]
    else:
        return config, make_params(
            config, lambda entry, _: leaves.pop(entry.path), dtype, quantization
        )
    with warnings.catch_warnings(action="ignore"):
        gc.collect()  # a failed load leaves coroutines, which warn when they are collected
    raise InputError(f"{path}: cannot be read as an Orbax checkpoint: {reason}")

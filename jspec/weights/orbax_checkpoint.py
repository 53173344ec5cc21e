"""Orbax folders: jspec's own parameter tree, config and tokenizer beside it.

```
  folder/config.json       in Hugging Face's spelling
  folder/params/           the arrays, as Orbax lays them out
  folder/tokenizer.json …  the tokenizer, if there is one
```
"""

import gc
import json
import pathlib
import warnings
from typing import Any

from jspec.common.errors import InputError
from jspec.common.new_folder import new_folder
from jspec.models.config import LlamaConfig
from jspec.models.hf_config import to_hf_config
from jspec.weights.assemble import as_dtype, check_params
from jspec.weights.hf import read_config
from jspec.weights.quantize import check_kind, quantize_leaves, refuse_quantized
from jspec.weights.room import check_room
from jspec.weights.rules import flatten, make_rules, nest
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
      config: the model.
      params: its parameters, floats.
      tokenizer: goes beside them.

    Raises:
      InputError: the folder exists or cannot be written, or the parameters are quantised.
      ValueError: the parameters do not fit the config.
    """
    from orbax.checkpoint import v1 as ocp

    refuse_quantized(params, folder)
    check_params(config, params)
    with new_folder(folder) as partial:
        ocp.save(str(partial / _PARAMS), params)
        text = json.dumps(to_hf_config(config), indent=2) + "\n"
        (partial / "config.json").write_text(text, encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(partial)


def load_orbax(
    folder: pathlib.Path, dtype: Any, quantization: str | None = None
) -> tuple[LlamaConfig, dict[str, Any]]:
    """Loads an Orbax folder that `save_orbax` wrote.

    Orbax reads all of it at once: kernels are quantised from `dtype` afterwards, one by one, each
    freed before the next.

    Args:
      folder: the folder.
      dtype: bfloat16 or float32; arrays are read into it.
      quantization: of the kernels; see `quantize.KINDS`.

    Returns:
      The config and the parameters, on the default device.

    Raises:
      InputError: anything missing, damaged, unknown or of another shape.
    """
    import jax
    from orbax.checkpoint import v1 as ocp

    config, dtype = read_config(folder), as_dtype(dtype)
    check_kind(config, quantization)
    check_room(config, dtype, None)  # all of it is there before it is quantised
    path = str((folder / _PARAMS).absolute())
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        rule.path: jax.ShapeDtypeStruct(rule.shape, dtype, sharding=sharding)
        for rule in make_rules(config)
    }
    try:
        check_params(config, ocp.metadata(path).metadata)
        leaves = flatten(ocp.load(path, nest(wanted)))
    except Exception as error:  # Orbax passes on what TensorStore and its own threads raise
        reason = " ".join(str(error).split())[:400]
    else:
        if quantization is not None:
            leaves = quantize_leaves(leaves, config, quantization)
        return config, nest(leaves)
    with warnings.catch_warnings(action="ignore"):
        gc.collect()  # a failed load leaves coroutines behind, which complain when they go
    raise InputError(f"{path}: cannot be read as an Orbax checkpoint: {reason}")

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
from jax.sharding import NamedSharding, PartitionSpec

from jspec.common.errors import InputError
from jspec.common.memory import give_back_freed
from jspec.common.typing import Params
from jspec.kernels import MODEL_AXIS
from jspec.models.config import DecoderConfig
from jspec.models.sharding import spread_config
from jspec.weights.assemble import as_dtype, check_params, check_room, make_params
from jspec.weights.hf import new_model_folder, read_config
from jspec.weights.quantize import check_kind
from jspec.weights.shards import shard_sharding, share_of
from jspec.weights.tensor_names import parameter_table
from jspec.weights.tokenizers.tokenizer import Tokenizer

PARAMS = "params"  # the subfolder that no other checkpoint has
# Orbax cuts the largest dimension first: hidden units and tokens, which meshes divide as well.
_CHUNK_BYTES = 1 << 20


def save_orbax(
    folder: pathlib.Path,
    config: DecoderConfig,
    params: Params,
    *,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Writes an Orbax folder of floats; see `new_model_folder`."""
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    saving = context.array.saving
    saving.scoped_storage_options_creator = lambda key, value: saving.StorageOptions(
        # Of queries, keys and values each chunk is of one head, not of some inputs of all.
        chunk_byte_size=_CHUNK_BYTES, shard_axes=(0,) if key[-1].key == "qkv" else None
    )  # fmt: skip
    with new_model_folder(folder, config, params, tokenizer) as partial, context:
        ocp.save(str(partial / PARAMS), params)


def load_orbax(
    folder: pathlib.Path,
    dtype: Any,
    quantization: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[DecoderConfig, Params]:
    """Returns the config and the parameters of a folder that `save_orbax` wrote.

    Orbax reads all parameters at once, in `dtype`. Kernels are then quantised from it in turn,
    and the floats of each are freed. With a mesh, of floats, each process keeps its own slices; a
    parameter of heads that will be copied is whole on every device, see `spread_params`.

    Raises:
      InputError: anything missing, damaged, unknown or of another shape.
    """
    from orbax.checkpoint import v1 as ocp

    config, dtype = read_config(folder), as_dtype(dtype)
    table = parameter_table(config)
    check_kind(config, quantization)
    # All the floats are there before any is quantised.
    check_room(config, dtype, None, share=1.0 if mesh is None else share_of(mesh))
    path = str((folder / PARAMS).absolute())
    try:
        stored = ocp.metadata(path).metadata
        check_params(config, stored)
        wanted = {
            entry.path: jax.ShapeDtypeStruct(entry.shape, entry.dtype_in(dtype), sharding=sharding)
            for entry, sharding in zip(table, _shardings(config, mesh), strict=True)
        }
        leaves = flatten_dict(ocp.load(path, unflatten_dict(wanted)))
    except Exception as error:  # Orbax passes on what TensorStore and its own threads raise
        reason = " ".join(str(error).split())[:400]
    else:
        give_back_freed()  # by threads that have read chunks
        if mesh is not None:
            return config, unflatten_dict(leaves)
        return config, make_params(
            config, lambda entry, _: leaves.pop(entry.path), dtype, quantization
        )
    with warnings.catch_warnings(action="ignore"):
        gc.collect()  # a failed load leaves coroutines, which warn when they are collected
    raise InputError(f"{path}: cannot be read as an Orbax checkpoint: {reason}")


def _shardings(config: DecoderConfig, mesh: jax.sharding.Mesh | None) -> list[Any]:
    if mesh is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return [sharding for _ in parameter_table(config)]
    spread = spread_config(config, mesh.shape[MODEL_AXIS])
    pairs = zip(parameter_table(config), parameter_table(spread), strict=True)
    return [
        shard_sharding(wanted, mesh) if stored.shape == wanted.shape
        else NamedSharding(mesh, PartitionSpec())
        for stored, wanted in pairs
    ]  # fmt: skip

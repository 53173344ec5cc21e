"""Hugging Face folders: config.json and safetensors, one file or several with an index."""

import collections
import math
import pathlib
from typing import Any

import numpy as np

from jspec.common.errors import InputError
from jspec.common.json_lines import read_json, save_json
from jspec.common.new_folder import new_folder
from jspec.models.config import LlamaConfig
from jspec.models.hf_config import to_hf_config
from jspec.weights.assemble import (
    TensorSource,
    check_params,
    iterate_tensors,
    load_params,
    parse_config,
)
from jspec.weights.quantize import refuse_quantized
from jspec.weights.safetensors_file import open_safetensors, save_safetensors
from jspec.weights.tensor_names import parameter_table
from jspec.weights.tokenizers.tokenizer import Tokenizer

_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_STORED_DTYPES = ("F32", "F16", "BF16")


def open_hf(folder: pathlib.Path) -> TensorSource:
    """Opens every safetensors file of a folder and reads the shapes.

    Raises:
      InputError: a file is missing, truncated or damaged, or holds something other than floats.
    """
    files: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file_name, promised in _list_files(folder).items():
        path = folder / file_name
        if promised and not path.exists():
            raise InputError(f"{path}: missing, although {_INDEX} names it")
        file = open_safetensors(path)
        for name in file.keys():  # noqa: SIM118 (not a dict)
            tensor = file.get_slice(name)
            if tensor.get_dtype() not in _STORED_DTYPES:
                raise InputError(
                    f"{path}: expected {name} as {', '.join(_STORED_DTYPES)}; got "
                    f"{tensor.get_dtype()}"
                )
            if name in shapes:
                raise InputError(f"{path}: {name} is in two files")
            shapes[name], files[name] = tuple(tensor.get_shape()), file
        if absent := promised - shapes.keys():
            raise InputError(f"{path}: lacks {min(absent)}, although {_INDEX} names it")

    def read(name: str, dtype: np.dtype) -> np.ndarray:
        return files[name].get_tensor(name).astype(dtype, copy=False)

    return TensorSource(str(folder), shapes, read)


def _list_files(folder: pathlib.Path) -> dict[str, set[str]]:
    """Returns the files of a folder, each with the tensors that an index promises in it."""
    if (folder / _FILE).is_file():
        return {_FILE: set()}
    path = folder / _INDEX
    if not path.is_file():
        raise InputError(f"{folder}: neither {_FILE} nor {_INDEX} in the folder")
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{path}: no weight_map")
    if not all(isinstance(file, str) for file in weight_map.values()):
        raise InputError(f"{path}: expected file names in weight_map")
    files: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        files.setdefault(file, set()).add(name)
    return files


def read_config(folder: pathlib.Path) -> LlamaConfig:
    """Reads config.json.

    Raises:
      InputError: no folder, no such file, or a value that jspec cannot honour.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    if not path.is_file():
        raise InputError(f"{folder}: no config.json in the folder")
    return parse_config(read_json(path), path)


def load_hf(
    folder: pathlib.Path, dtype: Any, quantization: str | None = None
) -> tuple[LlamaConfig, dict[str, Any]]:
    """Returns the config and the parameters of a Hugging Face folder; see `load_params`.

    Raises:
      InputError: anything missing, damaged, unknown or of another shape.
    """
    config = read_config(folder)
    return config, load_params(config, open_hf(folder), dtype, quantization)


def save_hf(
    folder: pathlib.Path,
    config: LlamaConfig,
    params: dict[str, Any],
    *,
    tokenizer: Tokenizer | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a Hugging Face folder; it appears when it is complete.

    Args:
      folder: must not exist, or be empty.
      config: the model's.
      params: its parameters, floats, all in one dtype.
      tokenizer: written next to them.
      max_shard_bytes: of one safetensors file; a single larger tensor gets a file of its own.

    Raises:
      InputError: the folder exists or cannot be written, or the parameters are quantised.
      ValueError: the parameters do not fit the config.
    """
    refuse_quantized(params, folder)
    with new_folder(folder) as partial:
        _write_tensors(partial, config, params, max_shard_bytes)
        dtype = str(params["embedding"].dtype)
        save_json(partial / "config.json", to_hf_config(config) | {"dtype": dtype})
        if tokenizer is not None:
            tokenizer.save(partial)


def _write_tensors(
    folder: pathlib.Path, config: LlamaConfig, params: dict[str, Any], max_shard_bytes: int
) -> None:
    import huggingface_hub

    check_params(config, params)
    num_bytes = {
        part.name: math.prod(part.shape) * params["embedding"].dtype.itemsize
        for entry in parameter_table(config)
        for part in entry.parts
    }
    split = huggingface_hub.split_state_dict_into_shards_factory(
        num_bytes,
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    shards: dict[str, dict[str, np.ndarray]] = collections.defaultdict(dict)
    for part, tensor in iterate_tensors(config, params):
        file = split.tensor_to_filename[part.name]
        shards[file][part.name] = tensor
        if len(shards[file]) == len(split.filename_to_tensors[file]):  # written, and freed
            save_safetensors(folder / file, shards.pop(file))
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        save_json(folder / _INDEX, index)

"""Hugging Face folders: config.json and safetensors, one file or several with an index."""

import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from jspec.common.errors import InputError
from jspec.common.json_lines import read_json, save_json
from jspec.common.new_files import new_folder
from jspec.common.typing import Params
from jspec.models.config import DecoderConfig
from jspec.models.families.encoder_decoders import is_called_tied
from jspec.models.families.hf_config import from_hf_config, to_hf_config
from jspec.weights.assemble import (
    TensorSource,
    as_dtype,
    check_params,
    check_room,
    check_source,
    load_params,
)
from jspec.weights.parameter import tensor_shapes
from jspec.weights.quantize import holds_compact
from jspec.weights.safetensors_file import open_safetensors, save_safetensors
from jspec.weights.shards import make_shards, share_of
from jspec.weights.tensor_names import HEAD, parameter_table
from jspec.weights.tokenizers.tokenizer import Tokenizer

_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_FILE_BYTES = 5_000_000_000  # as transformers has it; a larger tensor gets a file of its own


def read_config(folder: pathlib.Path) -> DecoderConfig:
    """Reads config.json.

    Raises:
      InputError: no folder, no such file, or a value that jspec cannot honour.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    if not path.is_file():
        raise InputError(f"{folder}: no config.json in the folder")
    raw = read_json(path)
    if raw.get("model_type") == "whisper":  # newer files say there what a transcript never has
        generation = read_json(folder / "generation_config.json")
        for key in ("suppress_tokens", "begin_suppress_tokens"):
            raw[key] = generation.get(key) or raw.get(key)
    try:
        return from_hf_config(raw)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    except (TypeError, ArithmeticError, AttributeError, LookupError, MemoryError) as error:
        raise InputError(
            f"{path}: a value of another type or size than expected ({error})"
        ) from None


def load_hf(
    folder: pathlib.Path,
    dtype: Any,
    quantization: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[DecoderConfig, Params]:
    """Returns the config and the parameters of a Hugging Face folder; see `load_params`.

    With a mesh, of floats, only what its devices here hold is read; see `make_shards`.
    """
    config, source = read_config(folder), _open(folder)
    if is_called_tied(config) and HEAD in source.shapes:
        config = dataclasses.replace(config, tie_embeddings=False)
    if mesh is None:
        return config, load_params(config, source, dtype, quantization)
    dtype = as_dtype(dtype)
    check_source(config, source)
    check_room(config, dtype, None, share=share_of(mesh))
    assert source.read_slice is not None
    return make_shards(config, mesh, dtype, source.read_slice)


def _open(folder: pathlib.Path) -> TensorSource:
    files: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    promised = _read_index(folder)
    for path in [folder / name for name in dict.fromkeys(promised.values()) or (_FILE,)]:
        if promised and not path.exists():
            raise InputError(f"{path}: missing, although {_INDEX} names it")
        file = open_safetensors(path)
        for name in file.keys():  # noqa: SIM118 (not a dict)
            tensor = file.get_slice(name)
            if (dtype := tensor.get_dtype()) not in ("F32", "F16", "BF16"):
                raise InputError(f"{path}: expected {name} as F32, F16, BF16; got {dtype}")
            if name in shapes:
                raise InputError(f"{path}: {name} is in two files")
            shapes[name], files[name] = tuple(tensor.get_shape()), file
    for name in promised.keys() - shapes.keys():
        raise InputError(f"{folder / promised[name]}: lacks {name}, although {_INDEX} names it")

    def read(name: str, dtype: np.dtype) -> np.ndarray:
        return files[name].get_tensor(name).astype(dtype, copy=False)

    def read_slice(name: str, dtype: np.dtype, box: tuple[slice, ...]) -> np.ndarray:
        return files[name].get_slice(name)[box or ...].astype(dtype, copy=False)

    return TensorSource(str(folder), shapes, read, read_slice=read_slice)


def _read_index(folder: pathlib.Path) -> dict[str, str]:
    """Returns the file that an index promises for each tensor; nothing if there is one file."""
    if (folder / _FILE).is_file():
        return {}
    path = folder / _INDEX
    if not path.is_file():
        raise InputError(f"{folder}: neither {_FILE} nor {_INDEX} in the folder")
    weight_map: Any = read_json(path).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise InputError(f"{path}: no weight_map with the file of each tensor")
    return weight_map


@contextlib.contextmanager
def new_model_folder(
    folder: pathlib.Path, config: DecoderConfig, params: Params, tokenizer: Tokenizer | None
) -> Iterator[pathlib.Path]:
    """Yields a folder for a model's arrays; config.json and the tokenizer are put beside them.

    The folder appears when it is complete.

    Raises:
      InputError: see `new_folder`; or the parameters are quantised.
      ValueError: the parameters do not fit the config.
    """
    if holds_compact(params):
        raise InputError(
            f"{folder}: expected float weights to write, got quantised ones; load the model with "
            "the quantization 'none'"
        )
    with new_folder(folder) as partial:
        check_params(config, params)
        yield partial
        dtype = str(params["embedding"].dtype)
        save_json(partial / "config.json", to_hf_config(config) | {"dtype": dtype})
        if tokenizer is not None:
            tokenizer.save(partial)


def save_hf(
    folder: pathlib.Path,
    config: DecoderConfig,
    params: Params,
    *,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Writes a Hugging Face folder of floats, each in its own dtype; see `new_model_folder`."""
    import huggingface_hub

    leaves: dict[tuple[str, ...], Any] = flatten_dict(params)
    table = parameter_table(config)
    owners = {part.name: entry for entry in table for part in entry.parts}
    with new_model_folder(folder, config, params, tokenizer) as partial:
        sizes = {
            name: math.prod(shape) * leaves[owners[name].path].dtype.itemsize
            for name, shape in tensor_shapes(table).items()
        }
        split = huggingface_hub.split_state_dict_into_shards_factory(
            sizes,
            get_storage_size=lambda size: size,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=_MAX_FILE_BYTES,
        )
        for file, names in split.filename_to_tensors.items():
            tensors = {}
            for entry in {owners[name].path: owners[name] for name in names}.values():
                tensors |= entry.unpack(np.asarray(leaves[entry.path]))
            save_safetensors(partial / file, {name: tensors[name] for name in names})
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            save_json(partial / _INDEX, index)

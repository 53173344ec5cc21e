"""Hugging Face folders: config.json and safetensors, one file or several with an index."""

import json
import pathlib
from typing import Any

import numpy as np

from jspec.common.errors import InputError
from jspec.common.new_folder import new_folder
from jspec.models.config import LlamaConfig
from jspec.models.hf_config import from_hf_config, to_hf_config
from jspec.weights.assemble import iterate_tensors, load_params
from jspec.weights.quantize import refuse_quantized
from jspec.weights.rules import Shape, flatten
from jspec.weights.tokenizers.files import check_readable, read_json
from jspec.weights.tokenizers.tokenizer import Tokenizer

_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_STORED_DTYPES = ("F32", "F16", "BF16")


class HfSource:
    """The safetensors of a folder as a source of tensors (see `assemble.TensorSource`).

    Files are memory-mapped; a tensor is read when it is asked for.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        """Opens every file and reads the shapes.

        Raises:
          InputError: a file is missing, truncated or damaged, or holds other than floats.
        """
        self.where = str(folder)
        self.shapes: dict[str, Shape] = {}
        self._files: dict[str, Any] = {}
        for name, names in _list_files(folder).items():
            self._open(folder / name, names)

    def _open(self, path: pathlib.Path, promised: set[str] | None) -> None:
        import safetensors

        if promised is not None and not path.exists():
            raise InputError(f"{path}: missing, although {_INDEX} names it")
        check_readable(path)
        try:
            file = safetensors.safe_open(path, framework="np")
        except (OSError, safetensors.SafetensorError) as error:
            raise InputError(f"{path}: truncated or damaged safetensors ({error})") from None
        for name in file.keys():  # noqa: SIM118 (no dict)
            tensor = file.get_slice(name)
            if tensor.get_dtype() not in _STORED_DTYPES:
                raise InputError(
                    f"{path}: expected {name} as {', '.join(_STORED_DTYPES)}; got "
                    f"{tensor.get_dtype()}"
                )
            if name in self.shapes:
                raise InputError(f"{path}: {name} is in two files")
            self.shapes[name] = tuple(tensor.get_shape())
            self._files[name] = file
        absent = (promised or set()) - self.shapes.keys()
        if absent:
            raise InputError(f"{path}: lacks {min(absent)}, although {_INDEX} names it")

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Returns a tensor in `dtype`."""
        return self._files[name].get_tensor(name).astype(dtype, copy=False)


def _list_files(folder: pathlib.Path) -> dict[str, set[str] | None]:
    """Returns the files of a folder, each with the tensors that the index promises in it."""
    if (folder / _FILE).is_file():
        return {_FILE: None}
    if not (folder / _INDEX).is_file():
        raise InputError(f"{folder}: neither {_FILE} nor {_INDEX} in the folder")
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{folder / _INDEX}: no weight_map")
    if not all(isinstance(file, str) for file in weight_map.values()):
        raise InputError(f"{folder / _INDEX}: expected file names in weight_map")
    files: dict[str, set[str] | None] = {}
    for name, file in weight_map.items():
        names = files.setdefault(file, set())
        assert names is not None
        names.add(name)
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
    try:
        return from_hf_config(read_json(path))
    except InputError:
        raise
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise InputError(f"{path}: {error}") from None


def load_hf(
    folder: pathlib.Path, dtype: Any, quantization: str | None = None
) -> tuple[LlamaConfig, dict[str, Any]]:
    """Loads a Hugging Face folder.

    Args:
      folder: with config.json, and model.safetensors or an index with its files.
      dtype: bfloat16 or float32.
      quantization: of the kernels; see `quantize.KINDS`.

    Returns:
      The config and the parameters.

    Raises:
      InputError: anything missing, damaged, unknown or of another shape.
    """
    config = read_config(folder)
    return config, load_params(config, HfSource(folder), dtype, quantization)


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
      config: the model.
      params: its parameters, floats, all in one dtype.
      tokenizer: goes beside them.
      max_shard_bytes: of one safetensors file; a single larger tensor has a file of its own.

    Raises:
      InputError: the folder exists or cannot be written, or the parameters are quantised.
      ValueError: the parameters do not fit the config.
    """
    refuse_quantized(params, folder)
    dtype = str(next(iter(flatten(params).values())).dtype)
    text = json.dumps(to_hf_config(config) | {"dtype": dtype}, indent=2) + "\n"
    with new_folder(folder) as partial:
        _write_tensors(partial, config, params, max_shard_bytes)
        (partial / "config.json").write_text(text, encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(partial)


def _write_tensors(
    folder: pathlib.Path, config: LlamaConfig, params: dict[str, Any], max_shard_bytes: int
) -> None:
    shards: list[list[str]] = []
    shard: dict[str, np.ndarray] = {}
    num_bytes = total = 0
    for part, tensor in iterate_tensors(config, params):
        if shard and num_bytes + tensor.nbytes > max_shard_bytes:
            shards.append(_write_shard(folder, len(shards), shard))
            shard, num_bytes = {}, 0
        shard[part.name] = tensor
        num_bytes, total = num_bytes + tensor.nbytes, total + tensor.nbytes
    shards.append(_write_shard(folder, len(shards), shard))
    _name_shards(folder, shards, total)


def _write_shard(folder: pathlib.Path, index: int, tensors: dict[str, np.ndarray]) -> list[str]:
    import safetensors.numpy

    path = folder / f"{index}.partial"
    try:
        safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:  # a full disk, for example
        raise OSError(str(error)) from None
    path.chmod(0o644)  # the library writes for the owner alone
    return list(tensors)


def _name_shards(folder: pathlib.Path, shards: list[list[str]], num_bytes: int) -> None:
    """Gives the files their final names, which tell how many there are, and writes the index."""
    if len(shards) == 1:
        (folder / "0.partial").rename(folder / _FILE)
        return
    weight_map = {}
    for index, names in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{index}.partial").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    content = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (folder / _INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

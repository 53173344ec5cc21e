"""PyTorch's own files, .bin and .pt, to safetensors, without running what they may hold.

Such a file is a pickle, which is a program: `torch.load(weights_only=True)` builds tensors and
plain containers and refuses everything else.
"""

import pathlib
import pickle
import re
import shutil
import warnings
from typing import Any

import numpy as np

from jspec.common.errors import InputError
from jspec.common.new_files import new_folder
from jspec.weights.assemble import as_dtype
from jspec.weights.safetensors_file import save_safetensors

_SUFFIXES = (".bin", ".pt", ".pth")
_READABLE = ("model.safetensors", "model.safetensors.index.json", "params")
_COPIED = (".json", ".txt", ".model", ".jinja")
_OWN_NAMES = ("medusa_lm_head",)  # of published Medusa heads
_GLOBAL = re.compile(r"GLOBAL (\S+)")


def find_torch_files(source: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of weights that a path means; none if it means something else.

    A folder means its `pytorch_model*.bin` or its single file, unless `load_model` can read it.

    Raises:
      InputError: a folder with several files, none of that name.
    """
    if not source.is_dir():
        return [source] if source.suffix in _SUFFIXES else []
    if any((source / name).exists() for name in _READABLE):
        return []
    files = sorted(path for path in source.iterdir() if path.suffix in _SUFFIXES)
    shards = sorted(source.glob("pytorch_model*.bin"))
    if not shards and len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise InputError(f"{source}: expected one file of weights, found {names}: name one")
    return shards or files


def convert_torch(files: list[pathlib.Path], output: pathlib.Path, dtype: Any) -> None:
    """Writes the tensors of one folder's files as safetensors, and copies the configs.

    Every float becomes `dtype`, "bfloat16" or "float32"; integers and flags stay as they are.

    Raises:
      InputError: see `read_torch` and `new_folder`; or a tensor is in two files.
    """
    tensors: dict[str, np.ndarray] = {}
    for path in files:
        for name, tensor in read_torch(path).items():
            if name in tensors:
                raise InputError(f"{path}: {name} is in two files")
            is_float = tensor.dtype == as_dtype("bfloat16") or tensor.dtype.kind == "f"
            tensors[name] = tensor.astype(as_dtype(dtype)) if is_float else tensor
    name = files[0].stem if files[0].stem in _OWN_NAMES else "model"
    with new_folder(output) as partial:
        save_safetensors(partial / f"{name}.safetensors", tensors)
        for path in files[0].parent.iterdir():
            if path.suffix in _COPIED and not path.name.endswith(".index.json"):
                shutil.copyfile(path, partial / path.name)


def read_torch(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a file by name; InputError if it holds anything else."""
    try:
        import torch
    except ImportError:
        raise InputError(f"{path}: reading it needs torch: pip install torch") from None
    try:
        with warnings.catch_warnings(action="ignore"):  # about pickles that it then refuses
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = "expected PyTorch's file of tensors, got something else or a damaged one"
        if blocked := _GLOBAL.search(str(error)):
            reason = f"expected tensors, but it asks for {blocked[1]}: refused, nothing was run"
        raise InputError(f"{path}: {reason}") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except (RuntimeError, ValueError, EOFError, LookupError, AttributeError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: truncated or damaged ({reason})") from None
    if not isinstance(tensors, dict) or not tensors:
        raise InputError(f"{path}: expected tensors by name, got {type(tensors).__name__}")
    return {name: _to_numpy(path, name, value) for name, value in tensors.items()}


def _to_numpy(path: pathlib.Path, name: Any, value: Any) -> np.ndarray:
    import torch

    if not isinstance(name, str):
        raise InputError(f"{path}: expected tensors by name, got the key {name!r}")
    if not isinstance(value, torch.Tensor):
        raise InputError(f"{path}: expected {name} to be a tensor, got {type(value).__name__}")
    if value.layout != torch.strided or value.is_complex() or value.is_quantized:
        raise InputError(f"{path}: {name}: expected a dense tensor of numbers, got {value.dtype}")
    value = value.detach().contiguous()
    if value.dtype == torch.bfloat16:  # numpy has no such type of its own
        return value.view(torch.int16).numpy().view(as_dtype("bfloat16"))
    return value.numpy()

"""Parameters from Hugging Face tensors and back, strictly: nothing missing, nothing left over."""

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jspec.common.errors import InputError
from jspec.common.memory import check_memory
from jspec.models.config import LlamaConfig
from jspec.models.hf_config import from_hf_config
from jspec.weights.quantize import check_kind, is_quantizable, num_bytes, quantize
from jspec.weights.tensor_names import Parameter, Part, Path, Shape, parameter_table

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_FLOAT32 = np.dtype(np.float32)
_DTYPES = {"bfloat16": np.dtype(jnp.bfloat16), "float32": _FLOAT32}
_NUM_NAMED = 4


@dataclasses.dataclass(frozen=True)
class TensorSource:
    """An open checkpoint, its tensors named and shaped as in Hugging Face's.

    Attributes:
      where: the checkpoint's path, for messages.
      shapes: the shape of every tensor by name.
      read: `(name, dtype) -> tensor`; called from several threads at once.
    """

    where: str
    shapes: dict[str, Shape]
    read: Callable[[str, np.dtype], np.ndarray]


def as_dtype(dtype: Any) -> np.dtype:
    """Returns the numpy dtype for "bfloat16" or "float32", or for the dtypes themselves.

    Raises:
      InputError: any other dtype.
    """
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if name not in _DTYPES:
        raise InputError(f"expected the dtype bfloat16 or float32, got {name}")
    return _DTYPES[name]


def parse_config(raw: Mapping[str, Any], where: Any) -> LlamaConfig:
    """Returns the config in the content of a config.json; `where` is its path, for messages.

    Raises:
      InputError: a value that jspec cannot honour.
    """
    try:
        return from_hf_config(raw)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise InputError(f"{where}: {error}") from None


def check_room(config: LlamaConfig, dtype: np.dtype, quantization: str | None) -> None:
    """Checks that the default device has room for the weights, before any is read.

    Args:
      config: the model's.
      dtype: of its floats.
      quantization: of its kernels; see `quantize.KINDS`.

    Raises:
      InputError: too little memory is free.
    """
    table = parameter_table(config)
    size = sum(num_bytes(parameter, quantization, dtype.itemsize) for parameter in table)
    check_memory({"weights": size}, "int8 or int4 weights, or a smaller model, take less")


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return ", ".join(names[:_NUM_NAMED]) + more


def _mismatch(expected: Mapping[str, Shape], found: Mapping[str, Shape]) -> str:
    """Returns what is missing, unknown or of another shape; an empty text if nothing is."""
    problems = []
    if missing := expected.keys() - found.keys():
        problems.append(f"missing tensors: {_listed(missing)}")
    if unknown := found.keys() - expected.keys():
        problems.append(f"unknown tensors: {_listed(unknown)}")
    wrong = [
        f"{name}: expected shape {list(shape)}, found {list(found[name])}"
        for name, shape in expected.items()
        if found.get(name, shape) != shape
    ]
    if len(wrong) > _NUM_NAMED:
        wrong[_NUM_NAMED:] = [f"{len(wrong) - _NUM_NAMED} more of another shape"]
    return "; ".join(problems + wrong)


def _ships_tied_head(config: LlamaConfig, source: TensorSource) -> bool:
    """Returns whether the source holds the embedding a second time, as a head; they must agree."""
    if not (config.tie_embeddings and _HEAD in source.shapes and _EMBEDDING in source.shapes):
        return False
    if source.shapes[_HEAD] != source.shapes[_EMBEDDING] or not np.array_equal(
        source.read(_HEAD, _FLOAT32), source.read(_EMBEDDING, _FLOAT32)
    ):
        raise InputError(
            f"{source.where}: the config ties head and embedding, but {_HEAD} differs from "
            f"{_EMBEDDING}"
        )
    return True


def check_tensors(config: LlamaConfig, source: TensorSource) -> None:
    """Checks that the source holds the model's tensors, each in its shape, and no others.

    Raises:
      InputError: names the tensors that are missing, unknown or of another shape.
    """
    expected = {part.name: part.shape for entry in parameter_table(config) for part in entry.parts}
    # Old converters also saved a buffer that the config determines.
    found = {k: v for k, v in source.shapes.items() if not k.endswith("rotary_emb.inv_freq")}
    if _ships_tied_head(config, source):
        del found[_HEAD]
    if problems := _mismatch(expected, found):
        raise InputError(f"{source.where}: {problems}")


def load_params(
    config: LlamaConfig, source: TensorSource, dtype: Any, quantization: str | None = None
) -> dict[str, Any]:
    """Reads a checkpoint into parameters on the default device.

    A few threads read one parameter each, already in its final dtype, so the model is never held
    twice. Kernels to be quantised are read in float32, so that they are rounded only once.

    Args:
      config: the model's.
      source: the open checkpoint.
      dtype: bfloat16 or float32.
      quantization: of the kernels; see `quantize.KINDS`.

    Returns:
      The nested dict of `tensor_names.parameter_table`.

    Raises:
      InputError: see `check_tensors`, `quantize.check_kind` and `check_room`.
    """
    check_tensors(config, source)
    check_kind(config, quantization)
    dtype = as_dtype(dtype)
    check_room(config, dtype, quantization)

    def load(parameter: Parameter) -> Any:
        kind = quantization if is_quantizable(parameter) else None
        read_as = dtype if kind is None else _FLOAT32
        tensors = {part.name: source.read(part.name, read_as) for part in parameter.parts}
        leaf = jax.device_put(parameter.pack(tensors, read_as))
        return leaf if kind is None else quantize(leaf, parameter.path, kind, dtype)

    table = parameter_table(config)
    with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        arrays = list(pool.map(load, table))
    return unflatten_dict({entry.path: array for entry, array in zip(table, arrays, strict=True)})


def check_params(config: LlamaConfig, params: dict[str, Any]) -> None:
    """Checks that a nested dict holds exactly the model's parameters.

    Raises:
      ValueError: names the parameters that are missing, unknown or of another shape.
    """
    expected = {"/".join(entry.path): entry.shape for entry in parameter_table(config)}
    leaves: dict[Path, Any] = flatten_dict(params)
    found = {"/".join(path): tuple(leaf.shape) for path, leaf in leaves.items()}
    if problems := _mismatch(expected, found):
        raise ValueError(f"parameters do not fit the config: {problems}")


def iterate_tensors(
    config: LlamaConfig, params: dict[str, Any]
) -> Iterator[tuple[Part, np.ndarray]]:
    """Yields every Hugging Face tensor of a model, with one parameter on the host at a time.

    Raises:
      ValueError: see `check_params`.
    """
    check_params(config, params)
    leaves = flatten_dict(params)
    for parameter in parameter_table(config):
        tensors = parameter.unpack(np.asarray(leaves[parameter.path]))
        for part in parameter.parts:
            yield part, tensors.pop(part.name)

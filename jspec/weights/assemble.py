"""From Hugging Face tensors to parameters, strictly: nothing missing, nothing left over."""

import concurrent.futures
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jspec.common.errors import InputError
from jspec.common.memory import check_memory
from jspec.common.typing import Params
from jspec.kernels import CompactKernel
from jspec.models.config import DecoderConfig
from jspec.weights.packed_weights import (
    PackedSource,
    is_all_packed,
    make_packed,
    num_packed_bytes,
    round_inputs_to_bytes,
    round_packed,
)
from jspec.weights.parameter import Parameter, Path, Shape, tensor_shapes
from jspec.weights.quantize import (
    PACKED,
    PACKED_KINDS,
    Q4_0,
    check_kind,
    is_quantizable,
    num_bytes,
    quantize,
)
from jspec.weights.shards import ReadSlice
from jspec.weights.tensor_names import parameter_table, tied_copies

_FLOAT32 = np.dtype(np.float32)
_DTYPES = {"bfloat16": np.dtype(jnp.bfloat16), "float32": _FLOAT32}
_NUM_NAMED = 4
Read = Callable[[Parameter, np.dtype], Any]  # an array, or a packed kernel


class TensorSource(NamedTuple):
    """An open checkpoint, its tensors named and shaped as in Hugging Face's."""

    where: str  # its path, for messages
    shapes: dict[str, Shape]  # of every tensor, by name
    read: Callable[[str, np.dtype], np.ndarray]  # called from several threads at once
    packed: PackedSource | None = None  # of a file of packed tensors; so are its functions
    read_slice: ReadSlice | None = None  # of a file of which a part can be read


def as_dtype(dtype: Any) -> np.dtype:
    """Returns the numpy dtype of bfloat16 or float32; raises InputError for anything else."""
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if name not in _DTYPES:
        raise InputError(f"expected the dtype bfloat16 or float32, got {name}")
    return _DTYPES[name]


def check_room(
    config: DecoderConfig,
    dtype: np.dtype,
    quantization: str | None,
    packed: PackedSource | None = None,
    share: float = 1.0,
) -> None:
    """Checks that the device has room for the weights, after `check_kind`; raises InputError.

    `share` is the part of them that its memory will hold.
    """
    table, itemsize = parameter_table(config), dtype.itemsize
    if packed is not None:
        size = sum(num_packed_bytes(parameter, packed, itemsize) for parameter in table)
    else:
        check_kind(config, quantization)
        size = sum(num_bytes(parameter, quantization, itemsize) for parameter in table)
    check_memory(
        {"weights": int(size * share)}, "int8 or int4 weights, or a smaller model, take less"
    )


def make_params(
    config: DecoderConfig, read: Read, dtype: np.dtype, quantization: str | None
) -> Params:
    """Returns the nested dict of `parameter_table`, on the default device.

    A few threads make one parameter each with `read`, in its final dtype, so the model is never
    held twice. Kernels to be quantised are read in float32, so that they are rounded only once.
    """

    def make(parameter: Parameter) -> Any:
        if quantization is None or not is_quantizable(parameter):
            return jax.device_put(read(parameter, parameter.dtype_in(dtype)))
        kernel = read(parameter, _FLOAT32)
        if isinstance(kernel, CompactKernel):  # it is small already
            return kernel
        kernel = jax.device_put(kernel)
        return quantize(kernel, parameter.path, quantization, dtype)

    table = parameter_table(config)
    with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        arrays = list(pool.map(make, table))
    return unflatten_dict({entry.path: array for entry, array in zip(table, arrays, strict=True)})


def check_counts(where: str, config: DecoderConfig, num_tensors: int) -> None:
    """Checks that a file has a tensor for each layer and each expert; raises InputError.

    The table of a damaged config's billions of them would take hours, and all memory.
    """
    num_sparse = sum(map(config.is_sparse, range(config.num_layers)))
    least = config.num_layers - num_sparse + num_sparse * config.num_experts
    if least > num_tensors:
        parts = f"{config.num_layers} layers and {config.num_experts} experts"
        raise InputError(f"{where}: expected a tensor for each of {parts}, found {num_tensors}")


def check_source(config: DecoderConfig, source: TensorSource) -> None:
    """Checks that a checkpoint has exactly a model's tensors.

    Raises:
      InputError: tensors are missing, unknown or of another shape.
    """
    check_counts(source.where, config, len(source.shapes))
    expected = tensor_shapes(parameter_table(config))
    # Old converters also saved a buffer that the config determines.
    actual = {k: v for k, v in source.shapes.items() if not k.endswith("rotary_emb.inv_freq")}
    # They may hold the embedding a second time, as a head; the two must agree.
    copies = {
        name: original
        for name, original in tied_copies(config).items()
        if actual.pop(name, None) is not None
    }
    if problems := _mismatch(expected, actual):
        raise InputError(f"{source.where}: {problems}")
    for pair in copies.items():
        head, embedding = (source.read(name, _FLOAT32) for name in pair)
        if not np.array_equal(head, embedding):
            raise InputError(f"{source.where}: the config ties head and embedding, but they differ")


def load_params(
    config: DecoderConfig, source: TensorSource, dtype: Any, quantization: str | None = None
) -> Params:
    """Reads a checkpoint into parameters; see `make_params`.

    Raises:
      InputError: see `check_source` and `check_room`.
    """
    check_source(config, source)
    dtype = as_dtype(dtype)
    if quantization in PACKED_KINDS and source.packed is not None:
        packed = source.packed
        check_room(config, dtype, None, packed)

        def read_packed(parameter: Parameter, dtype: np.dtype) -> Any:
            return make_packed(parameter, packed, source.read, dtype)

        params = make_params(config, read_packed, dtype, None)
        return params if quantization == PACKED else round_inputs_to_bytes(params)
    check_room(config, dtype, quantization)

    def read(parameter: Parameter, wanted: np.dtype) -> Any:
        # Never as floats: of what is small a second rounding would lose bits, and save none.
        if (
            quantization == Q4_0
            and source.packed is not None
            and is_all_packed(parameter, source.packed)
        ):
            kernel = make_packed(parameter, source.packed, source.read, dtype)
            return round_packed(kernel, parameter.path)
        names = {part.name for part in parameter.parts}
        return parameter.pack({name: source.read(name, wanted) for name in names}, wanted)

    return make_params(config, read, dtype, quantization)


def _mismatch(expected: Mapping[str, Shape], actual: Mapping[str, Shape]) -> str:
    """Returns what is missing, unknown or of another shape; an empty text if nothing is."""
    wrong = [
        f"{name}: expected shape {list(shape)}, found {list(actual[name])}"
        for name, shape in expected.items()
        if actual.get(name, shape) != shape
    ]
    problems = {
        "missing tensors: ": sorted(expected.keys() - actual.keys()),
        "unknown tensors: ": sorted(actual.keys() - expected.keys()),
        "": wrong,
    }
    texts = []
    for text, names in problems.items():
        more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
        # A damaged file may hold names of several lines.
        shown = [name if name.isprintable() else repr(name) for name in names[:_NUM_NAMED]]
        texts += [text + ", ".join(shown) + more] if names else []
    return "; ".join(texts)


def check_params(config: DecoderConfig, params: Params) -> None:
    """Checks that a nested dict holds exactly the model's parameters.

    Raises:
      ValueError: names the parameters that are missing, unknown or of another shape.
    """
    expected = {"/".join(entry.path): entry.shape for entry in parameter_table(config)}
    leaves: dict[Path, Any] = flatten_dict(params)
    actual = {"/".join(path): tuple(leaf.shape) for path, leaf in leaves.items()}
    if problems := _mismatch(expected, actual):
        raise ValueError(f"parameters do not fit the config: {problems}")

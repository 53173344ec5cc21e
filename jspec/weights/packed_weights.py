"""Kernels as a GGUF file holds them: its blocks in another order, and never as floats.

Several tensors may fill one parameter (see `tensor_names`). Those of one format are packed
together. Where the formats differ, as in Q4_K_M files whose values have more bits than their
queries and keys, the parameter is a `JoinedKernel`, a part for each format.
"""

import concurrent.futures
import math
import operator
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jspec.common.typing import Params
from jspec.kernels import Kernel
from jspec.kernels.packed import (
    FORMATS,
    STRIP,
    JoinedKernel,
    PackedKernel,
    as_in_file,
    has_fast_packed_products,
    pack,
    round_strips,
    unpack,
)
from jspec.weights.parameter import Parameter, Path
from jspec.weights.quantize import block_format, is_quantizable, quantize_blocks

Read = Callable[[str, np.dtype], np.ndarray]  # a tensor by its Hugging Face name, in floats


class PackedTensor(NamedTuple):
    """A tensor as a file holds it.

    Attributes:
      kind: its format, a key of `FORMATS`, or another name.
      blocks: those of each output, uint8 [o bytes], a view of the file.
      order: which of these rows is Hugging Face's first output, second ..., [o].
    """

    kind: str
    blocks: np.ndarray
    order: np.ndarray


class PackedSource(NamedTuple):
    """An open file of packed tensors, by their Hugging Face names."""

    find: Callable[[str], PackedTensor]
    release: Callable[[], None]  # lets go of the memory that the file's pages take


def num_packed_bytes(parameter: Parameter, source: PackedSource, float_bytes: int) -> int:
    """Returns how many bytes a parameter takes, if a float takes `float_bytes`."""
    names = _names_by_format(parameter, source)
    num_floats = sum(math.prod(p.shape) for p in parameter.parts if p.name in names.get(None, ()))
    packed = [source.find(name).blocks for kind in names if kind for name in names[kind]]
    strips = sum(-(-len(blocks) // STRIP) * STRIP * blocks.shape[1] for blocks in packed)
    return num_floats * float_bytes + strips


def is_all_packed(parameter: Parameter, source: PackedSource) -> bool:
    """Returns whether a file holds no part of a kernel in floats."""
    return None not in _names_by_format(parameter, source)


def make_packed(parameter: Parameter, source: PackedSource, read: Read, dtype: np.dtype) -> Kernel:
    """Returns a parameter on the default device, packed unless the file holds floats."""
    names_of = _names_by_format(parameter, source)
    if names_of.keys() == {None}:
        floats = {name: read(name, parameter.dtype_in(dtype)) for name in names_of[None]}
        return jax.device_put(parameter.pack(floats, dtype))
    outputs, kernels, places = _outputs(parameter), [], []
    for kind, names in names_of.items():
        rows_of_format = np.concatenate([outputs[name] for name in names])
        order = np.argsort(rows_of_format)  # their outputs stay in the parameter's order
        places.append(rows_of_format[order])
        if kind is None:
            rows = np.concatenate([read(name, dtype) for name in names])
            kernels.append(jax.device_put(rows[order]))
        else:
            tensors = [source.find(name) for name in names]
            begins = np.cumsum([0, *(len(tensor.blocks) for tensor in tensors)])
            pairs = zip(begins, tensors, strict=False)  # the last is the end
            rows = np.concatenate([begin + tensor.order for begin, tensor in pairs])[order]
            strips = pack([tensor.blocks for tensor in tensors], kind, rows, source.release)
            shape = len(order), parameter.parts[0].shape[1]
            kernels.append(PackedKernel(jax.device_put(strips), kind, shape, dtype))
    if len(kernels) == 1:
        return kernels[0].replace(shape=parameter.shape)
    order = np.argsort(np.concatenate(places)).astype(np.int32)
    return JoinedKernel(tuple(kernels), jax.device_put(order), parameter.shape)


def round_inputs_to_bytes(params: Any) -> Any:
    """Returns packed kernels whose products round their inputs to bytes: another model's."""

    def rounds(leaf: Any) -> Any:
        return leaf.replace(takes_bytes=True) if isinstance(leaf, PackedKernel) else leaf

    return jax.tree.map(rounds, params, is_leaf=lambda leaf: isinstance(leaf, PackedKernel))


def round_packed(kernel: Kernel, path: Path) -> Kernel:
    """Returns a packed kernel rounded as "q4_0" has it (see `quantize`), where that saves bits.

    Its products round their inputs to bytes. One that is partly floats stays.
    """
    kind = block_format(path)
    parts: tuple[Any, ...] = kernel.parts if isinstance(kernel, JoinedKernel) else (kernel,)
    formats = [part.kind if isinstance(part, PackedKernel) else None for part in parts]
    outputs = [math.prod(part.shape[:-1]) for part in parts]
    if None in formats or sum(map(operator.mul, outputs, map(_num_bits, formats))) <= (
        sum(outputs) * _num_bits(kind)
    ):
        return round_inputs_to_bytes(kernel)
    rounded = [_round_part(part, kind) for part in parts]
    if not isinstance(kernel, JoinedKernel):
        return rounded[0]
    rows = [np.asarray(as_in_file(part.strips, kind)) for part in rounded]
    rows = [row.reshape(-1, row.shape[2] * row.shape[3]) for row in rows]
    rows = [row[: part.shape[0]] for row, part in zip(rows, parts, strict=True)]
    strips = jax.device_put(pack(rows, kind, np.asarray(kernel.order)))
    return rounded[0].replace(strips=strips, shape=kernel.shape)


def _num_bits(kind: str | None) -> float:
    assert kind is not None
    return 8 * FORMATS[kind].num_bytes / FORMATS[kind].inputs


def _round_part(part: PackedKernel, kind: str) -> PackedKernel:
    if part.kind == kind:
        return part.replace(takes_bytes=True)
    if has_fast_packed_products():
        strips = jax.device_put(round_strips(np.asarray(part.strips), part.kind))
        return part.replace(strips=strips, kind=kind, takes_bytes=True)
    weights = unpack(part.strips, part.kind)[: math.prod(part.shape[:-1])]
    return quantize_blocks(weights, kind, part.dtype).replace(shape=part.shape)


def round_packed_params(params: Params) -> Params:
    """Returns a model's parameters, each kernel as by `round_packed`."""
    leaves: dict[Any, Any] = flatten_dict(params)
    paths = [path for path, leaf in leaves.items() if isinstance(leaf, PackedKernel | JoinedKernel)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        rounded = pool.map(lambda path: round_packed(leaves[path], path), paths)
        return unflatten_dict(leaves | dict(zip(paths, rounded, strict=True)))


def _names_by_format(parameter: Parameter, source: PackedSource) -> dict[str | None, list[str]]:
    """Returns the tensors of each format, a key of `FORMATS`; None is that of floats."""
    names: dict[str | None, list[str]] = {}
    for name in dict.fromkeys(part.name for part in parameter.parts):  # a fused one counts once
        kind = source.find(name).kind if is_quantizable(parameter) else None
        names.setdefault(kind if kind in FORMATS else None, []).append(name)
    return names


def _outputs(parameter: Parameter) -> dict[str, np.ndarray]:
    """Returns which of a kernel's outputs, counted from 0, the rows of each tensor are."""
    shape = parameter.shape[:-1]
    outputs = np.arange(math.prod(shape)).reshape(shape)
    by_name: dict[str, np.ndarray] = {}
    for part in parameter.parts:  # those of a fused tensor are in the order of its rows
        rows = outputs[part.index].reshape(-1)
        by_name[part.name] = (
            np.concatenate([by_name[part.name], rows]) if part.name in by_name else rows
        )
    return by_name

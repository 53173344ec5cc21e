"""Parameters over a mesh of devices, each shard made of those slices of tensors that are in it.

A process reads what its own devices hold and no more. Every shard of a parameter is the same
arrangement of its tensors' rows or columns:

```
  qkv   [K G+2 H D]   q_proj: rows of the shard's query heads; k_proj, v_proj: of its key heads
  down  [D F]         down_proj: columns of the shard's hidden units
```

Where there are fewer key/value heads than devices, several shards have the same rows of k_proj.

Compact kernels are stored as matrices, and have no axes to split. Their outputs are put in another
order, shard after shard, each arranged as the kernel of its device's model:

```
  gate_up [2 F D]     gate 0 … F    up 0 … F    ->    gate 0 … F/2    up 0 … F/2    gate F/2 … F …
```
"""

import concurrent.futures
import functools
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.common.errors import InputError
from jspec.common.typing import Params
from jspec.kernels import (
    MODEL_AXIS,
    CompactKernel,
    JoinedKernel,
    PackedKernel,
    QuantizedKernel,
    devices_per_memory,
)
from jspec.kernels.packed import FORMATS, STRIP
from jspec.kernels.quantized import GROUP
from jspec.models.config import DecoderConfig
from jspec.models.sharding import (
    is_by_inputs,
    parameter_specs,
    split_axis,
    split_spec,
    spread_config,
)
from jspec.weights.parameter import Parameter
from jspec.weights.tensor_names import parameter_table

Box = tuple[slice, ...]  # of a tensor
ReadSlice = Callable[[str, np.dtype, Box], np.ndarray]


def make_shards(
    config: DecoderConfig, mesh: Mesh, dtype: np.dtype, read: ReadSlice
) -> tuple[DecoderConfig, Params]:
    """Returns the spread config, see `sharding.spread_config`, and parameters on the mesh.

    `read` gives slices of a checkpoint's tensors, and is called from several threads.

    Raises:
      InputError: the devices cannot share the model's layers.
    """
    spread = spread_config(config, mesh.shape[MODEL_AXIS])

    def make(pair: tuple[Parameter, Parameter]) -> jax.Array:
        stored, parameter = pair
        return make_parameter(parameter, stored, mesh, parameter.dtype_in(dtype), read)

    tables = parameter_table(config), parameter_table(spread)
    with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        arrays = pool.map(make, zip(*tables, strict=True))
        return spread, unflatten_dict(
            {parameter.path: array for parameter, array in zip(tables[1], arrays, strict=True)}
        )


def make_parameter(
    parameter: Parameter, stored: Parameter, mesh: Mesh, dtype: np.dtype, read: ReadSlice
) -> jax.Array:
    """Returns one parameter on the mesh; `stored` is the checkpoint's, of other heads perhaps."""
    count, shape = mesh.shape[MODEL_AXIS], parameter.shape
    axis = split_axis(parameter.path[-1], shape, count)
    # Of the rows of a mesh each has all shards: a shard is read once for all of them.
    of_number = functools.cache(
        lambda number: read_shard(parameter, stored, axis, number, count, dtype, read)
    )

    def shard(index: Any) -> np.ndarray:
        number = 0 if axis is None else (index[axis].start or 0) * count // shape[axis]
        return of_number(number)

    return jax.make_array_from_callback(shape, shard_sharding(parameter, mesh), shard)


def shard_sharding(parameter: Parameter, mesh: Mesh) -> NamedSharding:
    """Returns how a parameter of a spread model lies."""
    spec = split_spec(parameter.path[-1], parameter.shape, mesh.shape[MODEL_AXIS])
    return NamedSharding(mesh, spec)


def share_of(mesh: Mesh) -> float:
    """Returns the part of a model that the memory of a device of this process will hold."""
    return min(devices_per_memory() / mesh.shape[MODEL_AXIS], 1.0)


def read_shard(
    parameter: Parameter,
    stored: Parameter,
    axis: int | None,
    number: int,
    count: int,
    dtype: np.dtype,
    read: ReadSlice,
) -> np.ndarray:
    """Returns the shard of that number."""
    if axis is None:
        names = dict.fromkeys(part.name for part in parameter.parts)
        return parameter.pack({name: read(name, dtype, ()) for name in names}, dtype)
    shape = list(parameter.shape)
    shape[axis] //= count
    shard = np.empty(shape, dtype)
    for part, kept in zip(parameter.parts, stored.parts, strict=True):
        target = shard[part.index]
        if is_by_inputs(parameter.path[-1]):
            begin, size = number * target.shape[-1], target.shape[-1]
            box: Box = (slice(None), slice(begin, begin + size))
        else:
            # Of a whole number of heads: the one of which several shards have a copy, if they do.
            size = target.size // (1 if len(kept.shape) == 1 else kept.shape[1])
            begin = number * kept.shape[0] // count // size * size
            begin += kept.rows.start if kept.rows else 0
            box = (slice(begin, begin + size),)
        target[...] = read(part.name, dtype, box).reshape(target.shape)
    return shard


def is_placed(leaf: Any, mesh: Mesh) -> bool:
    """Returns whether an array, or a shape, lies on a mesh."""
    sharding = getattr(leaf, "sharding", None)
    return isinstance(sharding, NamedSharding) and sharding.mesh == mesh


def put_whole(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Returns an array that this process has whole, of which each device gets its part."""
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def place_everywhere(tree: Any, mesh: Mesh) -> Any:
    """Returns arrays of this process, the same in all of them, as arrays on every device.

    Those that lie on the mesh already stay as they do.
    """
    sharding = NamedSharding(mesh, PartitionSpec())

    def place(leaf: Any) -> Any:
        if is_placed(leaf, mesh):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(sharding=sharding)
        return put_whole(leaf, sharding)

    return jax.tree.map(place, tree)


def spread_params(
    config: DecoderConfig, params: Params, mesh: Mesh
) -> tuple[DecoderConfig, Params]:
    """Returns the config and parameters of the spread model; see `make_shards`.

    Arrays that lie there already, as they should, stay as they are; compact kernels must not.

    Raises:
      InputError: the devices cannot share the model's layers, or would cut a group of integers or a
        block or strip of packed weights.
    """
    leaves: dict[tuple[str, ...], Any] = flatten_dict(params)
    dtype = np.dtype(params["embedding"].dtype)
    spread, placed = spread_config(config, mesh.shape[MODEL_AXIS]), {}
    tables = parameter_table(config), parameter_table(spread)
    for stored, parameter in zip(*tables, strict=True):
        leaf = leaves[parameter.path]
        if isinstance(leaf, CompactKernel):
            placed[parameter.path] = _spread_compact(leaf, parameter, stored, mesh)
            continue
        if is_placed(leaf, mesh) and leaf.shape == parameter.shape:
            placed[parameter.path] = leaf
            continue
        tensors = stored.unpack(np.asarray(leaf))
        read: ReadSlice = lambda name, _, box, tensors=tensors: tensors[name][box or ...]  # noqa: E731
        placed[parameter.path] = make_parameter(
            parameter, stored, mesh, parameter.dtype_in(dtype), read
        )
    return spread, unflatten_dict(placed)


def _spread_compact(
    kernel: CompactKernel, parameter: Parameter, stored: Parameter, mesh: Mesh
) -> CompactKernel:
    """Returns a compact kernel whose rows, or strips of rows, lie shard after shard."""
    name, count = parameter.path[-1], mesh.shape[MODEL_AXIS]
    axis = split_axis(name, parameter.shape, count)
    if axis is not None and is_by_inputs(name):
        size = FORMATS[kernel.kind].inputs if isinstance(kernel, PackedKernel) else GROUP
        if parameter.shape[-1] // count % size:
            expected = f"a mesh whose model:N leaves groups of {size} inputs of {name} whole"
            raise InputError(f"expected {expected}, got model:{count}")
    elif axis is not None:
        kernel = _take(kernel, _outputs_of_shards(parameter, stored, axis, count), name)
    kernel = kernel.replace(shape=parameter.shape)

    return jax.tree.map(
        lambda spec, array: put_whole(array, NamedSharding(mesh, spec)),
        parameter_specs({name: kernel}, count)[name],
        kernel,
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )


def _outputs_of_shards(
    parameter: Parameter, stored: Parameter, axis: int, count: int
) -> list[np.ndarray]:
    """Returns which of a stored kernel's outputs each shard has, [o_i], in its order."""
    # The numbers of outputs are split as a kernel of one input would be.
    outputs = np.arange(math.prod(stored.shape[:-1])).reshape(*stored.shape[:-1], 1)
    narrow, kept = _narrow(parameter), _narrow(stored)
    numbers = kept.unpack(outputs)
    read: ReadSlice = lambda name, _, box: numbers[name][box]  # noqa: E731
    return [
        read_shard(narrow, kept, axis, shard, count, outputs.dtype, read).ravel()
        for shard in range(count)
    ]


def _narrow(parameter: Parameter) -> Parameter:
    """Returns the same arrangement of tensors of one column."""
    parts = tuple(part._replace(shape=(part.shape[0], 1)) for part in parameter.parts)
    return parameter._replace(shape=(*parameter.shape[:-1], 1), parts=parts)


def _take(kernel: Any, shards: list[np.ndarray], name: str) -> Any:
    """Returns a kernel of the outputs of all shards, in their order."""
    if isinstance(kernel, JoinedKernel):
        begins = np.cumsum([0, *(part.shape[0] for part in kernel.parts)])
        places = [np.asarray(kernel.order)[outputs] for outputs in shards]
        parts, owners = [], [np.digitize(place, begins) - 1 for place in places]
        for index, part in enumerate(kernel.parts):
            rows = [p[o == index] - begins[index] for p, o in zip(places, owners, strict=True)]
            taken = _take(part, rows, name)
            parts.append(taken if isinstance(taken, np.ndarray) else
                         taken.replace(shape=(sum(map(len, rows)), part.shape[1])))  # fmt: skip
        # A shard's outputs are among its own parts, each in the shard's order.
        order = [np.argsort(np.argsort(o, kind="stable")) for o in owners]
        return kernel.replace(parts=tuple(parts), order=np.concatenate(order).astype(np.int32))
    outputs = np.concatenate(shards)
    if isinstance(kernel, QuantizedKernel):
        return jax.tree.map(lambda array: np.asarray(array)[outputs], kernel)
    if not isinstance(kernel, PackedKernel):
        return np.asarray(kernel)[outputs]
    first = outputs[::STRIP]  # of each strip
    strips = (first[:, None] + np.arange(STRIP)).ravel()
    is_cut = any(len(shard) % STRIP for shard in shards) or (first % STRIP).any()
    if is_cut or (strips != outputs).any():
        expected = f"a mesh whose model:N leaves strips of {STRIP} outputs of {name} whole"
        raise InputError(f"expected {expected}, got model:{len(shards)}")
    return kernel.replace(strips=np.asarray(kernel.strips)[first // STRIP])

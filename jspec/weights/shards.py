"""Parameters over a mesh of devices, each shard made of those slices of tensors that are in it.

A process reads what its own devices hold and no more. Every shard of a parameter is the same
arrangement of its tensors' rows or columns:

```
  qkv   [K G+2 H D]   q_proj: rows of the shard's query heads; k_proj, v_proj: of its key heads
  down  [D F]         down_proj: columns of the shard's hidden units
```

Where there are fewer key/value heads than devices, several shards have the same rows of k_proj.
"""

import concurrent.futures
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.common.typing import Params
from jspec.kernels import MODEL_AXIS, devices_per_memory
from jspec.models.config import DecoderConfig
from jspec.models.sharding import is_by_inputs, split_axis, split_spec, spread_config
from jspec.weights.parameter import Parameter
from jspec.weights.tensor_names import parameter_table

Box = tuple[slice, ...]  # of a tensor
ReadSlice = Callable[[str, np.dtype, Box], np.ndarray]


def make_shards(
    config: DecoderConfig,
    mesh: Mesh,
    dtype: np.dtype,
    reader_of: Callable[[Parameter], ReadSlice],
) -> tuple[DecoderConfig, Params]:
    """Returns the spread config, see `sharding.spread_config`, and parameters on the mesh.

    Args:
      config: the checkpoint's.
      mesh: the devices.
      dtype: of the parameters.
      reader_of: given one of the checkpoint's parameters, what reads slices of its tensors; called
        from several threads.

    Raises:
      InputError: the devices cannot share the model's layers.
    """
    spread = spread_config(config, mesh.shape[MODEL_AXIS])

    def make(pair: tuple[Parameter, Parameter]) -> jax.Array:
        stored, parameter = pair
        return make_parameter(parameter, stored, mesh, parameter.dtype_in(dtype), reader_of(stored))

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
        values = np.asarray(leaf)
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    return jax.tree.map(place, tree)

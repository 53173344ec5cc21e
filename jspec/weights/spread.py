"""Parameters of one device, spread over a mesh; each passes the host.

Compact kernels are stored as matrices, and have no axes to split. Their outputs are put in another
order, shard after shard, each arranged as the kernel of its device's model:

```
  gate_up [2 F D]     gate 0 … F    up 0 … F    ->    gate 0 … F/2    up 0 … F/2    gate F/2 … F …
```
"""

import math
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.common.errors import InputError
from jspec.common.typing import Params
from jspec.kernels import MODEL_AXIS, CompactKernel, PackedKernel, QuantizedKernel
from jspec.kernels.packed import STRIP, JoinedKernel
from jspec.kernels.packed_formats import FORMATS
from jspec.kernels.quantized import GROUP
from jspec.models.config import DecoderConfig
from jspec.models.sharding import is_by_inputs, parameter_specs, split_axis, spread_config
from jspec.weights.parameter import Parameter
from jspec.weights.shards import ReadSlice, is_placed, make_parameter, read_shard
from jspec.weights.tensor_names import parameter_table


def spread_params(
    config: DecoderConfig, params: Params, mesh: Mesh
) -> tuple[DecoderConfig, Params]:
    """Returns the config and parameters of the spread model; see `shards.make_shards`.

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

    def place(spec: PartitionSpec, array: Any) -> jax.Array:
        values, sharding = np.asarray(array), NamedSharding(mesh, spec)
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    return jax.tree.map(
        place, parameter_specs({name: kernel}, count)[name], kernel,
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )  # fmt: skip


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

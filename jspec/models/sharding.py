"""How a model lies on a mesh of devices: one table from parameters to axes, and a device's config.

```
  mesh data:2,model:4      d0 d1 d2 d3     a row of devices shares each layer: a quarter of the
                           d4 d5 d6 d7     heads and hidden units each; each row answers its prompts
```

Queries, keys and values are split by key/value head, the feed-forward layer by hidden unit, the
vocabulary by token (Megatron-LM, arXiv 1909.08053). So a layer needs two sums over the devices, of
what attention and the feed-forward layer return, and the cache needs none. A model with fewer
key/value heads than there are devices has each of them on several.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jspec.common.errors import InputError
from jspec.common.typing import Params
from jspec.kernels import MODEL_AXIS, CompactKernel, JoinedKernel, PackedKernel, SplitKernel
from jspec.models.config import DecoderConfig

DATA_AXIS = "data"
# The axis of each parameter that is split, by its last key. The others are on every device.
_OUTPUTS = {
    "embedding": 0, "head": 0, "qkv": 0, "qkv_bias": 0, "gate_up": 1, "gate_up_bias": 1,
    "experts_gate_up": 2,
}  # fmt: skip
_INPUTS = {"out": 1, "down": 1, "experts_down": 2}
_JOINED = {"embedding", "head", *_INPUTS}  # whose products the devices join
_AXIS = re.compile(rf"({DATA_AXIS}|{MODEL_AXIS}):([1-9][0-9]{{0,5}})")


def make_mesh(text: str, devices: Sequence[Any] | None = None) -> Mesh:
    """Returns the mesh of a text such as `data:2,model:4`; an axis left out has one device.

    It takes the first of the devices, by default of all that JAX has.

    Raises:
      InputError: another text, or a mesh that does not fit the devices.
    """
    axes = [_AXIS.fullmatch(part.strip()) for part in text.split(",")]
    sizes = {match[1]: int(match[2]) for match in axes if match is not None}
    if len(sizes) < len(axes):
        raise InputError(f"expected a mesh such as data:2,model:4, got {text!r}")
    shape = sizes.get(DATA_AXIS, 1), sizes.get(MODEL_AXIS, 1)
    devices, number = jax.devices() if devices is None else devices, math.prod(shape)
    if len(devices) % number or (jax.process_count() > 1 and number != len(devices)):
        several = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
        whole = "that has all" if several else "whose number of devices divides"
        there = f"{len(devices)} devices that are" if len(devices) > 1 else "1 device that is"
        raise InputError(
            f"expected a mesh {whole} the {there} there{several}, got {text}, of {number}"
        )
    return Mesh(np.array(devices[:number]).reshape(shape), (DATA_AXIS, MODEL_AXIS))


def spread_config(config: DecoderConfig, count: int) -> DecoderConfig:
    """Returns the config of the same model with a key/value head at least for each device.

    Raises:
      InputError: the devices cannot share its layers evenly.
    """
    if config.encoder is not None:
        raise InputError(f"expected a decoder alone on a mesh, got a {config.family} with encoder")
    num_kv_heads = config.num_kv_heads
    if count % num_kv_heads == 0:
        num_kv_heads = max(num_kv_heads, count)
    for name, number in (
        ("query heads", config.num_heads),
        ("key/value heads", num_kv_heads),
        ("hidden units", config.hidden_dim),
        ("hidden units of an expert", config.expert_dim),
    ):
        if number % count:
            expected = f"a mesh whose model:N divides the target's {number} {name}"
            raise InputError(f"expected {expected}, got model:{count}")
    if config.qk_norm == "full" and count > 1:
        raise InputError(
            f"expected a mesh of model:1, got model:{count}: the target ({config.family}) norms "
            "all heads together"
        )
    return dataclasses.replace(config, num_kv_heads=num_kv_heads)


def shard_config(config: DecoderConfig, count: int) -> DecoderConfig:
    """Returns the config by which one of `count` devices computes; see `spread_config`."""
    names = "num_heads", "num_kv_heads", "hidden_dim", "expert_dim"
    sizes = {name: getattr(config, name) // count for name in names}
    return dataclasses.replace(config, **sizes, num_shards=count)


def split_axis(name: str, shape: tuple[int, ...], count: int) -> int | None:
    """Returns the axis along which a parameter is split, by its last key; None if it is not."""
    axis = (_OUTPUTS | _INPUTS).get(name)
    # A vocabulary that does not divide stays whole; heads and hidden units do (`spread_config`).
    return None if axis is None or shape[axis] % count else axis


def is_by_inputs(name: str) -> bool:
    """Returns whether a parameter is split along the inputs of its product."""
    return name in _INPUTS


def split_spec(name: str, shape: tuple[int, ...], count: int) -> PartitionSpec:
    """Returns how an array of a parameter of this name and shape lies; see `split_axis`."""
    axis = split_axis(name, shape, count)
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, MODEL_AXIS)


def parameter_specs(params: Params, count: int) -> Params:
    """Returns the `PartitionSpec` of each array of the parameters."""

    def spec(path: tuple[Any, ...], leaf: Any) -> Any:
        name = path[-1].key
        if not isinstance(leaf, CompactKernel):
            return split_spec(name, leaf.shape, count)
        axis = split_axis(name, leaf.shape, count)
        rows = PartitionSpec(*(MODEL_AXIS,) * (axis is not None and name in _OUTPUTS))
        matrix = PartitionSpec(None, MODEL_AXIS) if axis is not None and name in _INPUTS else rows
        # Rows and strips of rows are the first axis of every array, inputs the second.
        return jax.tree.map(lambda array: rows if array.ndim == 1 else matrix, leaf)

    return jax.tree_util.tree_map_with_path(spec, params, is_leaf=_is_compact)


def join_products(params: Params, specs: Params, count: int) -> Params:
    """Returns a device's own parameters such that products are those of all devices together."""

    def join(path: tuple[Any, ...], leaf: Any, spec: Any) -> Any:
        name = getattr(path[-1], "key", "")
        parts = jax.tree.leaves(spec, is_leaf=lambda part: isinstance(part, PartitionSpec))
        is_split = any(MODEL_AXIS in part for part in parts)
        if is_split and isinstance(leaf, CompactKernel):
            leaf = _own_part(leaf, split_axis(name, leaf.shape, count), count)
        if name not in _JOINED or not is_split or count == 1:
            return leaf
        return SplitKernel(leaf, count, is_by_inputs(name))

    return jax.tree_util.tree_map_with_path(join, params, specs, is_leaf=_is_compact)


def _own_part(kernel: Any, axis: int | None, count: int) -> Any:
    """Returns a compact kernel with the shape of a device's part, which no array of it has."""
    shape = tuple(size // (count if i == axis else 1) for i, size in enumerate(kernel.shape))
    if isinstance(kernel, JoinedKernel):  # whose parts are matrices, split by outputs
        parts = (
            _own_part(part, 0, count) if isinstance(part, PackedKernel) else part
            for part in kernel.parts
        )
        kernel = kernel.replace(parts=tuple(parts))
    return kernel.replace(shape=shape)


def _is_compact(leaf: Any) -> bool:
    return isinstance(leaf, CompactKernel)

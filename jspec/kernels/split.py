"""A kernel of which each device of a mesh holds a part, and what joins the parts' products.

```
  by outputs   device 0 [v/2 d]   device 1 [v/2 d]      each has some outputs of the product: gather
  by inputs    device 0 [d f/2]   device 1 [d f/2]      each has a part of every sum: add up
```

Those of a head need not be gathered: a device's part of them are `SplitLogits`.

It all lives inside a program that every device runs on its own shard (`jax.shard_map`), where there
are no whole arrays. So kernels in C++ take the part that is there.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int, Int32

from jspec.common.typing import AnyLogits
from jspec.kernels.vocabulary import first_argmax

MODEL_AXIS = "model"  # the axis of the mesh whose devices share each layer


class SplitKernel(struct.PyTreeNode):
    """A device's part of a kernel [*out i].

    Attributes:
      part: what this device has, any other kind of kernel.
      count: number of devices.
      by_inputs: whether the parts are inputs, the last axis, or rows, the first.
    """

    part: Any
    count: int = struct.field(pytree_node=False)
    by_inputs: bool = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the part, as a device's layer has it; if by outputs, with all devices' rows."""
        if self.by_inputs:
            return self.part.shape
        return (self.part.shape[0] * self.count, *self.part.shape[1:])

    @property
    def dtype(self) -> Any:
        """The type of the weights."""
        return self.part.dtype

    def join(self, outputs: Array) -> Array:
        """Returns the product with the whole kernel, from that with the part; on all devices."""
        if self.by_inputs:
            return jax.lax.psum(outputs, MODEL_AXIS)
        return jax.lax.all_gather(outputs, MODEL_AXIS, axis=outputs.ndim - 1, tiled=True)

    def find(self, ids: Int[Array, "b t"]) -> tuple[Int[Array, "b t"], Bool[Array, "b t"]]:
        """Returns where ids are in this device's rows, and whether they are there."""
        num_own = self.part.shape[0]
        places = ids - jax.lax.axis_index(MODEL_AXIS) * num_own
        return jnp.clip(places, 0, num_own - 1), (places >= 0) & (places < num_own)


class SplitLogits(struct.PyTreeNode):
    """A device's part of logits [*b v], or of values computed of logits: those of its ids.

    Attributes:
      part: what this device has, [*b v/n]; the devices have the ids in their order.
      count: number of devices.
    """

    part: Float32[Array, "*b u"]
    count: int = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of all devices' parts together."""
        return (*self.part.shape[:-1], self.part.shape[-1] * self.count)

    def __getitem__(self, index: Any) -> "SplitLogits":
        """Returns the part of some rows or positions; an index never names ids."""
        return self.replace(part=self.part[index])

    def gather(self, values: Array) -> Array:
        """Returns the values [*b k] of every device, [*b n·k]."""
        return jax.lax.all_gather(values, MODEL_AXIS, axis=values.ndim - 1, tiled=True)


def whole(logits: AnyLogits) -> Float32[Array, "*b v"]:
    """Returns the logits of all devices on every device, where they are split."""
    return logits.gather(logits.part) if isinstance(logits, SplitLogits) else logits


def own_part(logits: AnyLogits) -> Float32[Array, "*b u"]:
    """Returns the part of logits that a device has: all where they are not split."""
    return logits.part if isinstance(logits, SplitLogits) else logits


def own_part_of(values: Array, logits: AnyLogits) -> Array:
    """Returns of values [... v], which all devices have, those of the ids of `own_part`."""
    if not isinstance(logits, SplitLogits):
        return values
    size = logits.part.shape[-1]
    begin = jax.lax.axis_index(MODEL_AXIS) * size
    return jax.lax.dynamic_slice_in_dim(values, begin, size, axis=-1)


def with_own_part(logits: AnyLogits, part: Float32[Array, "*b u"]) -> AnyLogits:
    """Returns what is split as the logits are, with another part."""
    return logits.replace(part=part) if isinstance(logits, SplitLogits) else part


def first_largest(logits: AnyLogits) -> tuple[Int32[Array, "*b"], Float32[Array, "*b"]]:
    """Returns `first_argmax` of all devices' logits, from every device's largest, 8 bytes."""
    if not isinstance(logits, SplitLogits):
        return first_argmax(logits)
    place, largest = first_argmax(logits.part)
    own_id = place + jax.lax.axis_index(MODEL_AXIS) * logits.part.shape[-1]
    # As integers, so that both go in one message.
    pair = jnp.stack([own_id, jax.lax.bitcast_convert_type(largest, jnp.int32)])
    ids, bits = logits.gather(pair[..., None])
    # The devices have the ids in order: the first of equal devices has the first of equal tokens.
    device, largest = first_argmax(jax.lax.bitcast_convert_type(bits, jnp.float32))
    # Where there is NaN that is the number of devices, and the place past the last id.
    best = jnp.take_along_axis(ids, device[..., None], axis=-1, mode="clip")[..., 0]
    return jnp.where(device < logits.count, best, logits.shape[-1]), largest

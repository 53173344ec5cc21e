"""A kernel of which each device of a mesh holds a part, and what joins the parts' products.

```
  by outputs   device 0 [v/2 d]   device 1 [v/2 d]      each has some outputs of the product: gather
  by inputs    device 0 [d f/2]   device 1 [d f/2]      each has a part of every sum: add up
```

It lives inside a program that every device runs on its own shard (`jax.shard_map`), where there are
no whole arrays. So kernels in C++ take the part that is there.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

MODEL_AXIS = "model"  # the axis of the mesh whose devices share each layer


class SplitKernel(struct.PyTreeNode):
    """A device's part of a kernel [*out i].

    Attributes:
      own: the part, any other kind of kernel.
      count: number of devices.
      by_inputs: whether the parts are inputs, the last axis, or rows, the first one.
    """

    own: Any
    count: int = struct.field(pytree_node=False)
    by_inputs: bool = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the part, as a device's layer has it; if by outputs, with all devices' rows."""
        if self.by_inputs:
            return self.own.shape
        return (self.own.shape[0] * self.count, *self.own.shape[1:])

    @property
    def dtype(self) -> Any:
        """The type of the weights."""
        return self.own.dtype

    def join(self, outputs: Array) -> Array:
        """Returns the product with the whole kernel, from that with the part; on all devices."""
        if self.by_inputs:
            return jax.lax.psum(outputs, MODEL_AXIS)
        return jax.lax.all_gather(outputs, MODEL_AXIS, axis=outputs.ndim - 1, tiled=True)

    def find(self, ids: Int[Array, "b t"]) -> tuple[Int[Array, "b t"], Bool[Array, "b t"]]:
        """Returns where ids are in this device's rows, and whether they are there."""
        num_own = self.own.shape[0]
        places = ids - jax.lax.axis_index(MODEL_AXIS) * num_own
        return jnp.clip(places, 0, num_own - 1), (places >= 0) & (places < num_own)

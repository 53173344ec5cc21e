"""The first of the largest values of a row."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jspec.kernels.device import prefers_unrolled_loops
from jspec.kernels.library import floats, in_cpp


def _results(values: Array) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return jax.ShapeDtypeStruct(values.shape[:-1], jnp.int32), floats(*values.shape[:-1])


@in_cpp("first_argmax", _results)
def first_argmax(
    values: Float32[Array, "... v"],
) -> tuple[Int32[Array, "..."], Float32[Array, "..."]]:
    """Returns the index of the largest value, the first one of equals, and that value.

    Where any value of a row is NaN, the largest value is NaN and the index is v.
    """
    size = values.shape[-1]
    if prefers_unrolled_loops():
        # XLA's argmax takes NaN as the largest. It is one kernel or two, where the reductions below
        # are five on a GPU.
        index = jnp.argmax(values, axis=-1).astype(jnp.int32)
        largest = jnp.take_along_axis(values, index[..., None], axis=-1)[..., 0]
        return jnp.where(jnp.isnan(largest), size, index), largest
    # NaN is looked for apart: XLA's maximum on CPU may skip it among thousands of numbers.
    has_nan = jnp.any(jnp.isnan(values), axis=-1, keepdims=True)
    largest = jnp.where(has_nan, jnp.nan, jnp.max(values, axis=-1, keepdims=True))
    # Two reductions, because XLA's own argmax on CPU takes four times as long.
    index = jnp.where(values == largest, jnp.arange(size, dtype=jnp.int32), size)
    return jnp.min(index, axis=-1), largest[..., 0]

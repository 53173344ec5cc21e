"""How fast a machine reads weights and multiplies, measured in a few seconds."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.common.timing import Loop, least_seconds, make_loop
from jspec.kernels import timed_products
from jspec.models.layers import linear

_WIDTH = 4096


class Machine(NamedTuple):
    """What a machine can do at most.

    Attributes:
      bandwidth: bytes of weights read in a second.
      flop_rate: floating-point operations in a second; a multiplication and an addition are two.
    """

    bandwidth: float
    flop_rate: float


def measure_machine(dtype: str) -> Machine:
    """Measures the default device, by the products that a model of that dtype consists of."""
    num_bytes, rows, width, *_ = timed_products(dtype)
    outputs = num_bytes // jnp.dtype(dtype).itemsize // _WIDTH
    reading = least_seconds(product_loop(1, _WIDTH, outputs, dtype))
    computing = least_seconds(product_loop(rows, width, width, dtype))
    return Machine(num_bytes / reading, 2 * rows * width**2 / computing)


def product_loop(rows: int, inputs: int, outputs: int, dtype: str) -> Loop:
    """Returns a loop over products of `rows` rows with one kernel, [outputs, inputs]."""
    keys = jax.random.split(jax.random.key(0))
    # Random, because a chip's clock depends on how many bits change.
    kernel = inputs**-0.5 * jax.random.normal(keys[0], [outputs, inputs], dtype)
    # In the type that needs no conversion, which in a model is a part of the norms.
    rows_dtype = timed_products(dtype).rows_dtype
    values = jax.random.normal(keys[1], [1, rows, inputs], rows_dtype)

    def turn(kernel: jax.Array, values: jax.Array) -> jax.Array:
        # The barrier keeps every output, and the next product waits for this one.
        outputs = jax.lax.optimization_barrier(linear(values, kernel))
        return values.at[0, 0, 0].set(outputs[0, 0, 0].astype(values.dtype))

    return make_loop(turn, kernel, values)

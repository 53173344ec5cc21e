"""How fast a machine reads weights and multiplies, measured in a few seconds.

Products follow one another in one compiled loop, so that neither the host's call nor its waiting is
in the figure; a loop of one is taken off one of several. The fastest of several runs counts: what
else the machine does meanwhile only slows them down. Weights are random, as a chip's clock depends
on how many bits change.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.kernels import timed_products
from jspec.models.layers import linear

_REPEATS = 6
_WIDTH = 4096


class Machine(NamedTuple):
    """What a machine can do at most.

    Attributes:
      bandwidth: bytes of weights read in a second.
      flop_rate: floating-point operations in a second; a multiplication and an addition are two.
    """

    bandwidth: float
    flop_rate: float


def measure_machine(dtype: str = "bfloat16") -> Machine:
    """Measures the default device, by the products that a model consists of.

    Args:
      dtype: "bfloat16" or "float32", of the weights.
    """
    num_bytes, rows, width, turns, _ = timed_products(dtype)
    outputs = num_bytes // jnp.dtype(dtype).itemsize // _WIDTH
    reading = _time_product(1, _WIDTH, outputs, dtype, turns)
    computing = _time_product(rows, width, width, dtype, turns)
    return Machine(num_bytes / reading, 2 * rows * width**2 / computing)


def _time_product(rows: int, inputs: int, outputs: int, dtype: str, turns: int) -> float:
    """Returns the seconds of one of so many products with a kernel [outputs, inputs]."""
    keys = jax.random.split(jax.random.key(0))
    kernel = inputs**-0.5 * jax.random.normal(keys[0], [outputs, inputs], dtype)
    # In the type that needs no conversion, which in a model is a part of the norms.
    rows_dtype = timed_products(dtype).rows_dtype
    values = jax.random.normal(keys[1], [1, rows, inputs], rows_dtype)

    @jax.jit
    def loop(values: jax.Array, kernel: jax.Array, num_turns: jax.Array) -> jax.Array:
        def body(_: jax.Array, values: jax.Array) -> jax.Array:
            # Behind the barrier no output can be left out, and the next product waits for this one.
            outputs = jax.lax.optimization_barrier(linear(values, kernel))
            return values.at[0, 0, 0].set(outputs[0, 0, 0].astype(values.dtype))

        return jax.lax.fori_loop(0, num_turns, body, values)

    return least_seconds(lambda count: loop(values, kernel, jnp.int32(count)), turns)


def least_seconds(loop: Callable[[int], jax.Array], turns: int) -> float:
    """Returns the seconds of a turn: what so many more turns add, by the fastest of several runs.

    Args:
      loop: compiled; from a number of turns.
      turns: to time, besides a first one.
    """
    seconds: dict[int, list[float]] = {1: [], 1 + turns: []}
    for count in [*seconds] * (1 + _REPEATS):  # the first run of each compiles
        begin = time.perf_counter()
        jax.block_until_ready(loop(count))
        seconds[count].append(time.perf_counter() - begin)
    return (min(seconds[1 + turns]) - min(seconds[1])) / turns

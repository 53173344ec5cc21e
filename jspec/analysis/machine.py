"""How fast a machine reads weights and multiplies, measured in a second or two.

The fastest of several runs counts: what else the machine does meanwhile only slows them down.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.models.layers import linear

_REPEATS = 12
# (bytes of the kernel that is read, rows and width of the product that is computed)
_SIZES = {"cpu": (256 << 20, 512, 2048)}
_ACCELERATOR_SIZES = (2 << 30, 8192, 8192)
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
    num_bytes, rows, width = _SIZES.get(jax.default_backend(), _ACCELERATOR_SIZES)
    outputs = num_bytes // jnp.dtype(dtype).itemsize // _WIDTH
    reading = _time_product(1, _WIDTH, outputs, dtype)
    computing = _time_product(rows, width, width, dtype)
    return Machine(num_bytes / reading, 2 * rows * width**2 / computing)


def _time_product(rows: int, inputs: int, outputs: int, dtype: str) -> float:
    """Returns the seconds of one product with a kernel [outputs, inputs]."""
    kernel = jnp.ones([outputs, inputs], dtype)
    values = jnp.ones([1, rows, inputs], jnp.float32)
    return least_seconds(jax.jit(linear), values, kernel)


def least_seconds(call: Callable[..., jax.Array], *arguments: jax.Array) -> float:
    """Returns the seconds of the fastest of several calls."""
    seconds = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        seconds.append(time.perf_counter() - begin)
    return min(seconds)

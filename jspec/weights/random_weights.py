"""Seeded random weights, to time models whose weights are not available."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.common.typing import Params
from jspec.models.config import DecoderConfig
from jspec.weights.assemble import as_dtype, check_room, make_params
from jspec.weights.parameter import Parameter, Shape
from jspec.weights.tensor_names import parameter_table

_STD = 0.02
# Mean and standard deviation, sqrt(4 · (256² - 1) / 12), of the sum of four uniform bytes.
_BYTES_MEAN, _BYTES_STD = 510.0, 147.8


def _mix(x: Any) -> Any:
    """Scrambles 32-bit integers reversibly, so that neighbours look unrelated."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw(salt: jax.Array, shape: Shape, dtype: np.dtype) -> jax.Array:
    """Returns nearly normal values of standard deviation 0.02.

    Each value is a hash of its index. On two cores a billion of them take 1.5 s, against 45 s with
    jax.random.normal, and no random bits are stored. The hash is too weak for sampling tokens.
    """
    index = jax.lax.iota(jnp.uint32, math.prod(shape))
    bits = _mix(_mix(index) + salt)
    parts = [(bits >> shift) & 0xFF for shift in (0, 8, 16, 24)]
    total = (parts[0] + parts[1] + parts[2] + parts[3]).astype(jnp.float32)
    values = (total - _BYTES_MEAN) * (_STD / _BYTES_STD)
    return values.astype(dtype).reshape(shape)


def random_params(
    config: DecoderConfig, seed: int, dtype: Any, quantization: str | None = None
) -> Params:
    """Returns random parameters: bell-shaped values of standard deviation 0.02, and norms of 1.

    The same seed gives the same parameters. Each is made on the device, in `dtype`, and quantised
    at once; see `assemble.make_params` and, for errors, `assemble.check_room`.
    """
    dtype = as_dtype(dtype)
    check_room(config, dtype, quantization)
    paths = [entry.path for entry in parameter_table(config)]
    salts = np.random.default_rng(seed).integers(1 << 32, size=len(paths), dtype=np.uint32)
    salt_of = dict(zip(paths, salts, strict=True))

    def draw(parameter: Parameter, _: np.dtype) -> jax.Array:
        if parameter.path[-1] == "scale":
            return jnp.ones(parameter.shape, parameter.dtype_in(dtype))
        return _draw(salt_of[parameter.path], parameter.shape, dtype)

    return make_params(config, draw, dtype, quantization)

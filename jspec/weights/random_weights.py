"""Seeded random weights, to time models whose weights are not available."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from jspec.models.config import LlamaConfig
from jspec.weights.assemble import as_dtype, check_room
from jspec.weights.quantize import check_kind, is_quantizable, quantize
from jspec.weights.tensor_names import Shape, parameter_table

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
    config: LlamaConfig, seed: int, dtype: Any, quantization: str | None = None
) -> dict[str, Any]:
    """Returns random parameters: bell-shaped values of standard deviation 0.02, and norms of 1.

    Args:
      config: the model's shape.
      seed: the same seed gives the same parameters.
      dtype: bfloat16 or float32; each array is made in it on the device.
      quantization: of the kernels, each as soon as it is made; see `quantize.KINDS`.

    Raises:
      InputError: see `quantize.check_kind` and `check_room`.
    """
    check_kind(config, quantization)
    dtype = as_dtype(dtype)
    check_room(config, dtype, quantization)
    leaves = {}
    salts = np.random.default_rng(seed)
    for entry in parameter_table(config):
        salt = salts.integers(1 << 32, dtype=np.uint32)
        is_norm = entry.path[-1] == "scale"
        leaf = jnp.ones(entry.shape, dtype) if is_norm else _draw(salt, entry.shape, dtype)
        if quantization is not None and is_quantizable(entry):
            leaf = quantize(leaf, entry.path, quantization, dtype)
        leaves[entry.path] = leaf
    return unflatten_dict(leaves)

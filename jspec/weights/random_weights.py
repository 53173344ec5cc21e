"""Seeded random weights: to measure shapes whose weights are not at hand."""

import functools
import math
from typing import Any

import numpy as np

from jspec.models.config import LlamaConfig
from jspec.weights.assemble import as_dtype
from jspec.weights.quantize import check_kind, is_quantizable, quantize
from jspec.weights.room import check_room
from jspec.weights.rules import Shape, make_rules, nest

_STD = 0.02
# The sum of four uniform bytes: its mean, and its standard deviation sqrt(4 · (256² - 1) / 12).
_BYTES_MEAN, _BYTES_STD = 510.0, 147.8


def _mix(x: Any) -> Any:
    """Scrambles 32-bit integers reversibly, so that neighbours look unrelated."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


@functools.cache
def _draw() -> Any:
    """Returns the jitted `(salt, shape, dtype) -> array` of nearly normal values, std 0.02.

    The values hash their own index: on two cores a billion take 1.5 s, where jax.random.normal
    takes 45 s, and no random bits are stored. Statistics of this quality would not do for
    sampling; for weights they do.
    """
    import jax
    import jax.numpy as jnp

    def draw(salt: jax.Array, shape: Shape, dtype: np.dtype) -> jax.Array:
        index = jax.lax.iota(jnp.uint32, math.prod(shape))
        bits = _mix(_mix(index) + salt)
        parts = [(bits >> shift) & 0xFF for shift in (0, 8, 16, 24)]
        total = (parts[0] + parts[1] + parts[2] + parts[3]).astype(jnp.float32)
        values = (total - _BYTES_MEAN) * (_STD / _BYTES_STD)
        return values.astype(dtype).reshape(shape)

    return jax.jit(draw, static_argnums=(1, 2))


def random_params(
    config: LlamaConfig, seed: int, dtype: Any, quantization: str | None = None
) -> dict[str, Any]:
    """Returns random parameters: bell-shaped values of std 0.02, norms 1.

    Args:
      config: the model's shape.
      seed: the same seed gives the same parameters.
      dtype: bfloat16 or float32; each array is made in it on the device.
      quantization: of the kernels, each as soon as it is made; see `quantize.KINDS`.

    Raises:
      InputError: see `quantize.check_kind` and `check_room`.
    """
    import jax.numpy as jnp

    check_kind(config, quantization)
    dtype = as_dtype(dtype)
    check_room(config, dtype, quantization)
    leaves = {}
    salts = np.random.default_rng(seed)
    for rule in make_rules(config):
        salt = salts.integers(1 << 32, dtype=np.uint32)
        if rule.path[-1] == "scale":
            leaves[rule.path] = jnp.ones(rule.shape, dtype)
        else:
            leaves[rule.path] = _draw()(salt, rule.shape, dtype)
        if quantization is not None and is_quantizable(rule):
            leaves[rule.path] = quantize(leaves[rule.path], rule.path, quantization, dtype)
    return nest(leaves)

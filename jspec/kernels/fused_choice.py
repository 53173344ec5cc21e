"""What computes a decoder block: kernels that fuse most of it, or XLA.

On a GPU each shape is tried once, on random numbers: the kernels must say what XLA says. Where they
fail, XLA computes with a warning. `JSPEC_FUSED=0` in the environment leaves everything to XLA.
"""

import concurrent.futures
import functools
import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jspec.kernels.backend import backend, has_bfloat16, is_foreign
from jspec.kernels.library import with_derivatives_of
from jspec.kernels.quantized import QuantizedKernel

Block = Callable[..., Any]  # (params, x, rope, visible, cache, …) -> (x, cache)

_TOLERANCE = 0.03  # of a token's change, or of a key: bfloat16 rounds to 0.004, several times
_VERDICTS: dict[Any, bool] = {}


def compute_block(reference: Block, config: Any, block_offset: int, *operands: Any) -> Any:
    """Returns what a decoder block of the model returns, by fused kernels or by the reference.

    The operands are its parameters, `x`, `rope`, `visible` and `cache`, and for a layer whose
    attention reads something else than `x` that.
    """
    if not _is_on():
        return reference(*operands)
    # Here, because other devices need not wait for Pallas.
    from jspec.kernels.fused_block import run_block, takes_block

    params, x, _, _, cache, *_ = operands
    if not takes_block(config, params, x, cache) or not has_bfloat16():
        return reference(*operands)
    fused = functools.partial(run_block, config, block_offset)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), operands)
    leaves, structure = jax.tree.flatten(shapes)
    key = config, block_offset, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    # For a device that is not here the kernels cannot be tried: they are taken to work.
    if key not in _VERDICTS and not is_foreign():
        _VERDICTS[key] = _works(reference, fused, shapes, block_offset)
    if not _VERDICTS.get(key, True):
        return reference(*operands)
    return with_derivatives_of(reference, fused, *operands)


def _is_on() -> bool:
    return backend() == "gpu" and os.environ.get("JSPEC_FUSED") != "0"


def _works(reference: Block, fused: Block, shapes: Any, block_offset: int) -> bool:
    """Tries a shape: Triton may not know the GPU, there may be no memory, or a wrong result."""
    try:
        # The caller is being traced; the trial must be computed now, and not become part of it. A
        # new thread traces nothing. (`ensure_compile_time_eval` would run kernels, not trace them.)
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            worst = thread.submit(_try, reference, fused, shapes, block_offset).result()
    except Exception as failure:
        first = (str(failure).strip().splitlines() or [""])[0]
        _warn(f"{type(failure).__name__}: {first[:100]}")
        return False
    if not worst <= _TOLERANCE:  # nor is it NaN
        _warn(f"on random numbers their results differ from XLA's by {worst:.1%}")
    return worst <= _TOLERANCE


def _try(reference: Block, fused: Block, shapes: Any, block_offset: int) -> float:
    operands = jax.jit(lambda: random_operands(shapes, block_offset))()
    found, expected = (jax.jit(each)(*operands) for each in (fused, reference))
    return float(_distance(operands[1], found, expected))


@functools.cache  # one line, however many shapes fail
def _warn(reason: str) -> None:
    cost = "decoding takes longer"
    message = f"jspec: the GPU's fused decoder block is not used ({reason}); {cost}"
    print(message, file=sys.stderr, flush=True)


@jax.jit
def _distance(x: Array, found: Any, expected: Any) -> Array:
    """Returns the largest distance of a token's change, a key or a value, as a share of it."""

    def share(one: Array, other: Array) -> Array:
        one, other = one.astype(jnp.float32), other.astype(jnp.float32)
        sizes = jnp.linalg.norm(other, axis=-1)
        return jnp.max(jnp.linalg.norm(one - other, axis=-1) / jnp.maximum(sizes, 1e-6))

    (own, cache), (other, other_cache) = found, expected
    pairs = zip(cache.keys + cache.values, other_cache.keys + other_cache.values, strict=True)
    return jnp.max(jnp.stack([share(own - x, other - x), *(share(*pair) for pair in pairs)]))


def random_operands(shapes: Any, block_offset: int) -> Any:
    """Returns random operands of those shapes: rows of different lengths, and a chain of tokens."""
    keys = (jax.random.key(seed) for seed in itertools.count())

    def draw(leaf: Any) -> Array:
        return jax.random.normal(next(keys), leaf.shape, leaf.dtype)

    def draw_param(leaf: Any) -> Any:
        if isinstance(leaf, QuantizedKernel):
            values = jax.random.randint(next(keys), leaf.values.shape, -127, 128, jnp.int8)
            return leaf.replace(values=values, scales=jnp.full(leaf.scales.shape, 3e-4))
        return 1 + draw(leaf) / 8 if len(leaf.shape) == 1 else draw(leaf) / 50  # scales lie about 1

    params, x, rope, visible, cache, *inputs = shapes
    is_leaf = lambda leaf: isinstance(leaf, QuantizedKernel)  # noqa: E731
    params = jax.tree.map(draw_param, params, is_leaf=is_leaf)
    b, t, s = visible.shape
    length = (s - t - block_offset) * (jnp.arange(b) + 1) // (b + 1)
    last = length[:, None, None] + block_offset + jnp.arange(t)[None, :, None]
    # Keys large enough for attention to choose: the mean of many values would be next to nothing.
    layers = {"keys": (4 * draw(cache.keys[0]),), "values": (draw(cache.values[0]),)}
    cache = cache.replace(length=length.astype(jnp.int32), **layers)
    return (
        params,
        draw(x),
        jax.tree.map(draw, rope),
        jnp.arange(s) <= last,
        cache,
        *map(draw, inputs),
    )

"""What computes a decoder block or a packed product: kernels that fuse most of it, or XLA.

On a GPU each shape is tried once, on random numbers: the kernels must say what XLA says. Where they
fail, XLA computes with a warning. `JSPEC_FUSED=0` in the environment leaves everything to XLA.
"""

import concurrent.futures
import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jspec.kernels.backend import backend, has_bfloat16, is_foreign
from jspec.kernels.library import with_derivatives_of
from jspec.kernels.packed import STRIP, PackedKernel
from jspec.kernels.packed_formats import FORMATS
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
    make = functools.partial(random_operands, block_offset=block_offset)
    return _choose("block", reference, fused, operands, (config, block_offset), make, _distance)


def compute_product(reference: Callable[..., Array], rows: Array, kernel: Any) -> Array:
    """Returns the product of rows with a packed kernel, decoded in the GPU's kernel or before it.

    XLA decodes all of it to memory for more rows than one.
    """
    if not _is_on():
        return reference(rows, kernel)
    from jspec.kernels.fused_block import MOST_ROWS, multiply, takes_kernel

    is_taken = rows.shape[0] <= MOST_ROWS and takes_kernel(kernel, rows.shape[1])
    if not is_taken or not has_bfloat16():
        return reference(rows, kernel)
    operands, distance = (rows, kernel), lambda _, *both: _share(*both)
    return _choose("product", reference, multiply, operands, (), random_product, distance)


def _choose(
    name: str, reference: Block, fused: Block, operands: Any, key: Any, make: Any, distance: Any
) -> Any:
    """Computes by the fused kernels, once they have passed a trial, or else by the reference."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), operands)
    leaves, structure = jax.tree.flatten(shapes)
    key = key, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    # For a device that is not here the kernels cannot be tried: they are taken to work.
    if key not in _VERDICTS and not is_foreign():
        failure = _try(reference, fused, functools.partial(make, shapes), distance)
        if failure and all(tuple(_VERDICTS.values())):  # one line, however many shapes fail
            message = f"jspec: the GPU's fused {name} is not used for a shape ({failure})"
            print(f"{message}; decoding takes longer", file=sys.stderr, flush=True)
        _VERDICTS[key] = not failure
    if not _VERDICTS.get(key, True):
        return reference(*operands)
    return with_derivatives_of(reference, fused, *operands)


def _is_on() -> bool:
    return backend() == "gpu" and os.environ.get("JSPEC_FUSED") != "0"


def _try(reference: Block, fused: Block, make: Any, distance: Any) -> str:
    """Returns why a shape fails, if it does: Triton may not know the GPU, there may be no memory,
    or a wrong result.
    """
    try:
        # The caller is being traced; the trial must be computed now, and not become part of it. A
        # new thread traces nothing. (`ensure_compile_time_eval` would run kernels, not trace them.)
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            worst = thread.submit(_worst, reference, fused, make, distance).result()
    except Exception as failure:
        first = (str(failure).strip().splitlines() or [""])[0]
        return f"{type(failure).__name__}: {first[:100]}"
    is_close = worst <= _TOLERANCE  # nor is it NaN
    return "" if is_close else f"on random numbers it differs from XLA's by {worst:.1%}"


def _worst(reference: Block, fused: Block, make: Any, distance: Any) -> float:
    operands = jax.jit(make)()
    found, expected = (jax.jit(each)(*operands) for each in (fused, reference))
    return float(distance(operands, found, expected))


def _share(one: Array, other: Array) -> Array:
    """Returns the largest distance of a row, as a share of it."""
    one, other = one.astype(jnp.float32), other.astype(jnp.float32)
    sizes = jnp.linalg.norm(other, axis=-1)
    return jnp.max(jnp.linalg.norm(one - other, axis=-1) / jnp.maximum(sizes, 1e-6))


@jax.jit
def _distance(operands: Any, found: Any, expected: Any) -> Array:
    """Returns the largest distance of a token's change, a key or a value, as a share of it."""
    x, (own, cache), (other, other_cache) = operands[1], found, expected
    pairs = zip(cache.keys + cache.values, other_cache.keys + other_cache.values, strict=True)
    return jnp.max(jnp.stack([_share(own - x, other - x), *(_share(*pair) for pair in pairs)]))


def random_product(shapes: Any) -> Any:
    """Returns random rows and a random kernel of those shapes."""
    rows, kernel = shapes
    keys = (jax.random.key(seed) for seed in itertools.count())
    return jax.random.normal(next(keys), rows.shape, rows.dtype), _draw_kernel(keys, kernel)


def _draw_kernel(keys: Iterator[Array], kernel: Any) -> Any:
    if isinstance(kernel, QuantizedKernel):
        values = jax.random.bits(next(keys), kernel.values.shape, jnp.uint8)
        values = jax.lax.bitcast_convert_type(values, kernel.values.dtype)
        multipliers = kernel.multipliers
        if multipliers is not None:  # -8 times 16 is the least that an int8 holds
            multipliers = jax.random.randint(next(keys), multipliers.shape, 1, 17, jnp.int8)
        scales = jnp.full(kernel.scales.shape, 3e-4)
        return kernel.replace(values=values, multipliers=multipliers, scales=scales)
    # Elements of two bytes are float16 numbers, and these bits leave some between 0 and 0.004.
    fields = FORMATS[kernel.kind].fields
    mask = np.concatenate(
        [np.full(STRIP * size * count, 0x1B if size == 2 else 0xFF) for size, count in fields]
    )
    strips = jax.random.bits(next(keys), kernel.strips.shape, jnp.uint8)
    masks = np.resize(mask.astype(np.uint8), strips.shape[1])  # of one block after the other
    return kernel.replace(strips=strips & masks)


def random_operands(shapes: Any, block_offset: int) -> Any:
    """Returns random operands of those shapes: rows of different lengths, and a chain of tokens."""
    keys = (jax.random.key(seed) for seed in itertools.count())

    def draw(leaf: Any) -> Array:
        return jax.random.normal(next(keys), leaf.shape, leaf.dtype)

    def is_compact(leaf: Any) -> bool:
        return isinstance(leaf, (QuantizedKernel, PackedKernel))

    def draw_param(leaf: Any) -> Any:
        if is_compact(leaf):
            return _draw_kernel(keys, leaf)
        return 1 + draw(leaf) / 8 if len(leaf.shape) == 1 else draw(leaf) / 50  # scales lie about 1

    params, x, rope, visible, cache, *inputs = shapes
    params = jax.tree.map(draw_param, params, is_leaf=is_compact)
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

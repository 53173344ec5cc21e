"""Starting a kernel written in Pallas, which Triton compiles for the GPU.

An array is handed to a kernel whole. The kernel computes where its own part lies.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

TILE = 16  # rows of the smallest product that tensor cores compute
_IS_INTERPRETED = False  # by JAX on any device, as tests do


def launch(
    kernel: Callable[..., None],
    results: Any,
    grid: tuple[int, ...],
    *operands: Any,
    in_place: Mapping[int, int] | None = None,
    stages: int = 1,
    warps: int = 4,
    **constants: Any,
) -> Any:
    """Runs a kernel once for each point of a grid, whose first axis is the fastest.

    Args:
      kernel: gets a reference for each operand and result; an operand that is None stays None.
      results: shapes.
      grid: its sizes.
      *operands: arrays and None.
      in_place: result by the operand whose memory it takes; operands that are None do not count.
      stages: turns of its loop for which loads are under way at a time.
      warps: of 32 threads each.
      **constants: what the kernel is compiled for.
    """
    # Measured: two warps for products with bfloat16 (docs/measurements.md). The other numbers of
    # warps and stages are guesses.
    call = pl.pallas_call(
        functools.partial(kernel, **constants),
        out_shape=results,
        grid=grid,
        input_output_aliases=dict(in_place or {}),
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=_IS_INTERPRETED,
    )
    with jax.numpy_dtype_promotion("standard"):  # Pallas mixes types of indices itself
        return call(*operands)


def load_floats(ref: Any, mask: jax.Array) -> jax.Array:
    """Returns the numbers that a reference points to, in float32, and zeros outside the mask."""
    mask = jnp.broadcast_to(mask, ref.shape)
    return triton.load(ref, mask=mask, other=0.0).astype(jnp.float32)


def power_of_two(size: int) -> int:
    """Returns the smallest power of two that is not below: sizes in Triton are such powers."""
    return 1 << (size - 1).bit_length()

"""An RMSNorm (arXiv 1910.07467) of few rows, one program a row."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from jspec.kernels.gpu.launch import launch, load_floats, power_of_two


def normed_rows(
    rows: Float[Array, "r i"],
    scales: Float[Array, "i"],
    *,
    epsilon: float,
    dtype: jax.typing.DTypeLike,
) -> Float[Array, "r i"]:
    """Returns each row over its root mean square, times the scales; a row depends on no other.

    XLA's own sums of squares depend on how many rows there are.
    """
    results = jax.ShapeDtypeStruct(rows.shape, dtype)
    return launch(_normalise, results, (rows.shape[0],), rows, scales, epsilon=epsilon)


def _normalise(rows_ref: Any, scales_ref: Any, result_ref: Any, *, epsilon: float) -> None:
    size = rows_ref.shape[1]
    inputs = jnp.arange(power_of_two(size))
    place, is_input = rows_ref.at[pl.program_id(0), inputs], inputs < size
    row = load_floats(place, is_input)
    factor = jax.lax.rsqrt(jnp.sum(row * row) / size + epsilon)
    row = row * factor * load_floats(scales_ref.at[inputs], is_input)
    place = result_ref.at[pl.program_id(0), inputs]
    triton.store(place, row.astype(result_ref.dtype), mask=is_input)

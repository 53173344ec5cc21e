"""Products of few rows with a bias, a gate or a residual after, in one kernel.

A norm before them has a kernel of its own, `normed_rows`: in the loop that multiplies, all programs
compute it anew. With 2,048 inputs and 16,384 outputs an H100 took 2.3 times as long as XLA so, and
without a norm 0.7 to 1.3 times, of other shapes (docs/measurements.md).

A row's result does not depend on the rows beside it, nor on how many there are. It is summed in one
order, in tiles of one shape.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Float32, Int8, UInt8

from jspec.kernels.gpu.launch import TILE, launch, load_floats
from jspec.kernels.gpu.packed_weights import load_weights

_MOST_INPUTS = 256  # of one turn of the loop
_STAGES = 4
_GROUP = 32  # inputs that are rounded to bytes together, or share a multiplier
ACTIVATIONS = ("silu", "gelu_tanh")


def few_rows_product(
    rows: Float[Array, "r i"],
    kernel: Float[Array, "o i"] | Int8[Array, "o i"] | UInt8[Array, "..."],
    *,
    packed: tuple[str, Any] | None = None,
    takes_bytes: bool = False,
    units: Float32[Array, "o"] | None = None,
    multipliers: Int8[Array, "o groups"] | None = None,
    bias: Float[Array, "..."] | None = None,
    activation: str | None = None,
    residual: Float32[Array, "r p"] | None = None,
    scale: float = 1.0,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> Float[Array, "r p"]:
    """Returns residual + scale · act(rows · kernelᵀ + bias), each where it is given.

    Rows are rounded to bfloat16 for the product, which is summed in float32.

    Args:
      rows: the inputs.
      kernel: its outputs are a multiple of `TILE`, twice that for gates, its inputs of `TILE`, too.
        It is floats, the integers of a `QuantizedKernel`, or strips.
      packed: where the kernel is strips of a `PackedKernel`, the name and layout of its format.
      takes_bytes: whether the rows are rounded to bytes; see `kernels.packed.round_to_bytes`.
      units: scales of the outputs of a kernel of integers.
      multipliers: those of 4-bit integers; see `kernels.quantized`.
      bias: one an output.
      activation: of the gate; then the first half of the outputs are gates and the second what they
        multiply, and the result has half as many.
      residual: what the result is added to.
      scale: of the result, before the residual is added.
      dtype: of the result.
    """
    num_rows = rows.shape[0]
    num_outputs = kernel.shape[0] * (1 if packed is None else TILE)
    num_outputs //= 1 if activation is None else 2
    results = jax.ShapeDtypeStruct((num_rows, num_outputs), dtype)
    # Tiles of rows that read the same weights run side by side, and find them in the cache.
    grid = -(-num_rows // TILE), num_outputs // TILE
    bias = None if bias is None else bias.reshape(-1)
    is_decoded = packed is not None or multipliers is not None
    return launch(
        _multiply, results, grid,
        rows, kernel, units, multipliers, bias, residual,
        stages=_STAGES, warps=4 if is_decoded else 2, activation=activation, scale=scale,
        packed=packed, takes_bytes=takes_bytes,
    )  # fmt: skip


def _multiply(
    rows_ref: Any, weights_ref: Any, units_ref: Any, multipliers_ref: Any,
    bias_ref: Any, residual_ref: Any, result_ref: Any, *, activation: str | None,
    scale: float, packed: tuple[str, Any] | None, takes_bytes: bool,
) -> None:  # fmt: skip
    """Computes one tile: some outputs of some rows. Rows are the columns of the tile."""
    num_rows, num_inputs = rows_ref.shape
    num_outputs = result_ref.shape[1]
    rows = pl.program_id(0) * TILE + jnp.arange(TILE)[None, :]
    tile = pl.program_id(1)
    own = tile * TILE + jnp.arange(TILE)[:, None]
    outputs = [own] if activation is None else [own, own + num_outputs]
    size = math.gcd(_MOST_INPUTS, num_inputs)  # of one turn, which leaves no rest
    is_row = rows < num_rows

    def load(part: int, first: Array) -> Array:
        if packed is not None:
            strip = tile + part * (num_outputs // TILE)
            return load_weights(weights_ref, strip, first, size, *packed)
        inputs = (first + jnp.arange(size))[None, :]
        if multipliers_ref is not None:
            return _load_nibbles(weights_ref, multipliers_ref, outputs[part], inputs)
        return triton.load(weights_ref.at[outputs[part], inputs])

    def add(turn: Any, sums: list[Array]) -> list[Array]:
        inputs = turn * size + jnp.arange(size)
        own_rows = load_floats(rows_ref.at[rows, inputs[:, None]], is_row)
        if takes_bytes:
            own_rows = _round_to_bytes(own_rows)
        own_rows = own_rows.astype(jnp.bfloat16)
        weights = [load(part, turn * size) for part in range(len(outputs))]
        products = [triton.dot(part.astype(jnp.bfloat16), own_rows) for part in weights]
        return [a + b for a, b in zip(sums, products, strict=True)]

    start = [jnp.zeros([TILE, TILE], jnp.float32) for _ in outputs]
    sums = jax.lax.fori_loop(0, num_inputs // size, add, start)
    if units_ref is not None:
        sums = [a * triton.load(units_ref.at[b]) for a, b in zip(sums, outputs, strict=True)]
    if bias_ref is not None:
        biases = [triton.load(bias_ref.at[each]).astype(jnp.float32) for each in outputs]
        sums = [a + b for a, b in zip(sums, biases, strict=True)]
    result = sums[0] if activation is None else _activate(sums[0], activation) * sums[1]
    if scale != 1.0:
        result = result * scale
    if residual_ref is not None:
        result = load_floats(residual_ref.at[rows, own], is_row) + result
    place = result_ref.at[rows, own]
    mask = jnp.broadcast_to(is_row, result.shape)
    triton.store(place, result.astype(result_ref.dtype), mask=mask)


def _load_nibbles(
    values_ref: Any, multipliers_ref: Any, outputs: Array, inputs: Array
) -> Float32[Array, "o i"]:
    """Returns the 4-bit integers of a `QuantizedKernel` times their multipliers."""
    group, own = inputs // _GROUP, inputs % _GROUP
    half = _GROUP // 2
    pairs = triton.load(values_ref.at[outputs, group * half + own % half]).astype(jnp.int32)
    codes = ((pairs >> own // half * 4 & 15) ^ 8) - 8  # in two's complement
    multipliers = triton.load(multipliers_ref.at[outputs, group]).astype(jnp.int32)
    return (codes * multipliers).astype(jnp.float32)


def _round_to_bytes(rows: Float32[Array, "i r"]) -> Float32[Array, "i r"]:
    groups = rows.reshape(-1, _GROUP, rows.shape[1])
    largest = jnp.max(jnp.abs(groups), axis=1)[:, None, :]
    units = jnp.where(largest > 0, 127 / largest, 0.0)
    # Triton has no rounding to the nearest.
    return (jnp.floor(groups * units + 0.5) * (largest / 127)).reshape(rows.shape)


def _activate(gates: Array, activation: str) -> Array:
    # The tanh approximation of gelu (arXiv 1606.08415): (1 + tanh(z)) / 2 is sigmoid(2 z).
    cubic = gates + 0.044715 * gates * gates * gates
    inner = gates if activation == "silu" else 2 * math.sqrt(2 / math.pi) * cubic
    return gates * jax.nn.sigmoid(inner)

"""Weights of GGUF's blocks, decoded by the kernel that multiplies them.

A tile of outputs is one strip (see `kernels.packed`): what a program reads lies in one piece, and
never becomes floats in memory. The formulas are those of `kernels.packed_formats`, element by
element instead of byte by byte.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton
from jaxtyping import Array, Float32, Int32

from jspec.kernels.gpu.launch import TILE


class _Strip:
    """Some inputs of one strip, from a block's first one on.

    Attributes:
      i: the inputs, counted in their block, [1 inputs].
    """

    def __init__(self, ref: Any, strip: Array, first: Array, size: int, form: Any) -> None:
        self._ref, self._strip, self._size, self._form = ref, strip, size, form
        self._first_block = jax.lax.div(first, form.inputs)
        self.i = jnp.arange(size)[None, :] % form.inputs

    def load(self, field: int, index: Array | int, run: int = 1) -> Int32[Array, "16 runs"]:
        """Returns a byte of a field for every input; each run of inputs has the same one.

        `index` counts in the field, and is that of each run's first input: [1 runs].
        """
        form, own = self._form, jnp.arange(TILE)[:, None]
        size, _ = form.fields[field]
        begin = sum(size * count for size, count in form.fields[:field])
        blocks = jnp.arange(0, self._size, run)[None, :] // form.inputs + self._first_block
        place = index // size * (TILE * size) + own * size + index % size
        place += TILE * (blocks * form.num_bytes + begin)
        return triton.load(self._ref.at[self._strip, place]).astype(jnp.int32)

    def first_of(self, run: int) -> Int32[Array, "1 runs"]:
        """Returns the number of each run in its block."""
        return jnp.arange(self._size // run)[None, :] % (self._form.inputs // run)

    def spread(self, values: Array, run: int) -> Array:
        """Returns each run's value for all its inputs."""
        runs = jnp.broadcast_to(values[:, :, None], (*values.shape, run))
        return runs.reshape(TILE, self._size)

    def half(self, field: int, element: int = 0) -> Float32[Array, "16 inputs"]:
        """Returns a block's float16 number for all its inputs."""
        run = self._form.inputs
        # Not a constant array, whose remainder Pallas does not lower for Triton.
        index = 2 * element + 0 * self.first_of(run)
        low, high = (self.load(field, index + byte, run) for byte in (0, 1))
        bits = (low | (high << 8)).astype(jnp.uint16)
        number = jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
        return self.spread(number, run)


def _q4_0(strip: _Strip) -> Array:
    codes = strip.load(1, strip.i % 16) >> (strip.i // 16 * 4) & 15
    return (codes - 8).astype(jnp.float32) * strip.half(0)


def _q8_0(strip: _Strip) -> Array:
    return _signed(strip.load(1, strip.i)) * strip.half(0)


def _q4_k(strip: _Strip) -> Array:
    codes = strip.load(2, strip.i // 64 * 32 + strip.i % 32) >> (strip.i // 32 % 2 * 4) & 15
    return _scale_in_32s(strip, codes)


def _q5_k(strip: _Strip) -> Array:
    codes = strip.load(3, strip.i // 64 * 32 + strip.i % 32) >> (strip.i // 32 % 2 * 4) & 15
    fifths = strip.load(2, strip.i % 32) >> (strip.i // 32) & 1
    return _scale_in_32s(strip, codes | fifths << 4)


def _q6_k(strip: _Strip) -> Array:
    low = strip.load(0, strip.i // 128 * 64 + strip.i % 64) >> (strip.i // 64 % 2 * 4) & 15
    high = strip.load(1, strip.i // 128 * 32 + strip.i % 32) >> (strip.i // 32 % 4 * 2) & 3
    factors = strip.spread(_signed(strip.load(2, strip.first_of(16), 16)), 16)
    return ((low | high << 4) - 32).astype(jnp.float32) * (factors * strip.half(3))


def _signed(codes: Array) -> Array:
    return jnp.where(codes > 127, codes - 256, codes).astype(jnp.float32)


def _scale_in_32s(strip: _Strip, codes: Array) -> Array:
    """Returns codes times the factor of their 32, minus its minimum, of 6 bits each."""
    group = strip.first_of(32)
    first, second, both = (strip.load(1, group % 4 + 4 * part, 32) for part in range(3))
    is_late = group >= 4
    factors = jnp.where(is_late, both & 15 | first >> 6 << 4, first & 63)
    minimums = jnp.where(is_late, both >> 4 | second >> 6 << 4, second & 63)
    factors, minimums = (strip.spread(x.astype(jnp.float32), 32) for x in (factors, minimums))
    return codes.astype(jnp.float32) * (factors * strip.half(0)) - minimums * strip.half(0, 1)


# Those of the files that are in use: Q4_0, Q8_0, Q4_K_M, Q5_K_M, Q6_K.
DECODED: dict[str, Callable[[_Strip], Array]] = {
    "q4_0": _q4_0, "q8_0": _q8_0, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k,
}  # fmt: skip


def load_weights(
    ref: Any, strip: Array, first: Array, size: int, kind: str, form: Any
) -> Float32[Array, "16 size"]:
    """Returns the weights of a strip's outputs for `size` inputs from `first` on; whole blocks.

    `form` is the layout of a block, a `kernels.packed_formats.Format`.
    """
    return DECODED[kind](_Strip(ref, strip, first, size, form))

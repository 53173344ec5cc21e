"""The block formats of GGUF files, decoded in JAX: the reference of the C++.

Each block holds the codes of 32 or 256 inputs, and the scales of every 16 or 32 of them. A weight
is factor · code - minimum. The layouts are those of llama.cpp's ggml-common.h.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array


class Format(NamedTuple):
    """How a block is laid out and decoded.

    Attributes:
      inputs: of a block.
      fields: (bytes of an element, number of elements) of each part of a block, in order.
      decode: blocks uint8 [..., bytes] -> float32 [..., inputs].
    """

    inputs: int
    fields: Sequence[tuple[int, int]]
    decode: Callable[[Array], Array]

    @property
    def num_bytes(self) -> int:
        """Bytes of a block."""
        return sum(size * count for size, count in self.fields)


def _halves(blocks: Array, begin: int) -> Array:
    """Returns the float16 number at a byte of each block, [... 1], in float32."""
    half = jax.lax.bitcast_convert_type(blocks[..., begin : begin + 2], jnp.float16)
    return half[..., None].astype(jnp.float32)


def _bits(values: Array, shift: int, num_bits: int) -> Array:
    mask = jnp.uint8((1 << num_bits) - 1)
    return (values >> jnp.uint8(shift)) & mask


def _nibbles(values: Array) -> Array:
    """Returns the low halves of the bytes of each run, and then the high ones."""
    return jnp.concatenate([_bits(values, 0, 4), _bits(values, 4, 4)], axis=-1)


def _decode_q4(blocks: Array, *, has_minimum: bool) -> Array:
    codes = _nibbles(blocks[..., -16:]).astype(jnp.float32)
    if has_minimum:
        return codes * _halves(blocks, 0) + _halves(blocks, 2)
    return (codes - 8) * _halves(blocks, 0)


def _decode_q5(blocks: Array, *, has_minimum: bool) -> Array:
    fifths = [_bits(blocks[..., -20 + i // 8], i % 8, 1) for i in range(32)]
    codes = _nibbles(blocks[..., -16:]) | (jnp.stack(fifths, axis=-1) << jnp.uint8(4))
    if has_minimum:
        return codes.astype(jnp.float32) * _halves(blocks, 0) + _halves(blocks, 2)
    return (codes.astype(jnp.float32) - 16) * _halves(blocks, 0)


def _decode_q8_0(blocks: Array) -> Array:
    codes = jax.lax.bitcast_convert_type(blocks[..., 2:], jnp.int8)
    return codes.astype(jnp.float32) * _halves(blocks, 0)


def _scaled(codes: Array, factors: Array, minimums: Array | None = None) -> Array:
    """Returns codes [... 256] times the factor of their group, minus its minimum."""
    grouped = codes.astype(jnp.float32).reshape(*factors.shape, -1)
    weights = grouped * factors[..., None]
    if minimums is not None:
        weights -= minimums[..., None]
    return weights.reshape(codes.shape)


def _six_bit_scales(blocks: Array) -> tuple[Array, Array]:
    """Returns the factors and minimums of the 8 groups of Q4_K and Q5_K, both [... 8]."""
    first, second, third = (blocks[..., 4 + 4 * i : 8 + 4 * i] for i in range(3))
    top = jnp.uint8(4)
    late = _bits(third, 0, 4) | (_bits(first, 6, 2) << top)
    late_minimum = _bits(third, 4, 4) | (_bits(second, 6, 2) << top)
    factors = jnp.concatenate([_bits(first, 0, 6), late], axis=-1).astype(jnp.float32)
    minimums = jnp.concatenate([_bits(second, 0, 6), late_minimum], axis=-1).astype(jnp.float32)
    return factors * _halves(blocks, 0), minimums * _halves(blocks, 2)


def _groups(blocks: Array, begin: int, bytes_a_run: int, shifts: Sequence[int], bits: int) -> Array:
    """Returns codes: of each run of bytes those at the first shift, then those at the next."""
    num_runs = 256 // (bytes_a_run * len(shifts))
    runs = blocks[..., begin : begin + num_runs * bytes_a_run]
    runs = runs.reshape(*blocks.shape[:-1], num_runs, 1, bytes_a_run)
    codes = jnp.concatenate([_bits(runs, shift, bits) for shift in shifts], axis=-2)
    return codes.reshape(*blocks.shape[:-1], 256)


def _decode_q4_k(blocks: Array) -> Array:
    return _scaled(_groups(blocks, 16, 32, (0, 4), 4), *_six_bit_scales(blocks))


def _decode_q5_k(blocks: Array) -> Array:
    fifths = _groups(blocks, 16, 32, range(8), 1) << jnp.uint8(4)
    return _scaled(_groups(blocks, 48, 32, (0, 4), 4) | fifths, *_six_bit_scales(blocks))


def _decode_q6_k(blocks: Array) -> Array:
    low = _groups(blocks, 0, 64, (0, 4), 4)
    high = _groups(blocks, 128, 32, (0, 2, 4, 6), 2) << jnp.uint8(4)
    factors = jax.lax.bitcast_convert_type(blocks[..., 192:208], jnp.int8).astype(jnp.float32)
    codes = (low | high).astype(jnp.float32) - 32
    return _scaled(codes, factors * _halves(blocks, 208))


def _decode_q2_k(blocks: Array) -> Array:
    factors = _bits(blocks[..., :16], 0, 4).astype(jnp.float32) * _halves(blocks, 80)
    minimums = _bits(blocks[..., :16], 4, 4).astype(jnp.float32) * _halves(blocks, 82)
    return _scaled(_groups(blocks, 16, 32, (0, 2, 4, 6), 2), factors, minimums)


def _decode_q3_k(blocks: Array) -> Array:
    low, high = blocks[..., 96:104], blocks[..., 104:108]
    fours = _nibbles(low)
    twos = jnp.concatenate([_bits(high, shift, 2) for shift in (0, 2, 4, 6)], axis=-1)
    factors = (fours | (twos << jnp.uint8(4))).astype(jnp.float32) - 32
    codes = _groups(blocks, 32, 32, (0, 2, 4, 6), 2)
    codes |= _groups(blocks, 0, 32, range(8), 1) << jnp.uint8(2)
    return _scaled(codes.astype(jnp.float32) - 4, factors * _halves(blocks, 108))


# By the name that GGUF gives it, in lower case.
FORMATS = {
    "q4_0": Format(32, ((2, 1), (4, 4)), functools.partial(_decode_q4, has_minimum=False)),
    "q4_1": Format(32, ((2, 2), (4, 4)), functools.partial(_decode_q4, has_minimum=True)),
    "q5_0": Format(32, ((2, 1), (4, 1), (4, 4)), functools.partial(_decode_q5, has_minimum=False)),
    "q5_1": Format(32, ((2, 2), (4, 1), (4, 4)), functools.partial(_decode_q5, has_minimum=True)),
    "q8_0": Format(32, ((2, 1), (4, 8)), _decode_q8_0),
    "q2_k": Format(256, ((1, 16), (4, 16), (2, 2)), _decode_q2_k),
    "q3_k": Format(256, ((4, 8), (4, 16), (1, 12), (2, 1)), _decode_q3_k),
    "q4_k": Format(256, ((2, 2), (1, 12), (4, 32)), _decode_q4_k),
    "q5_k": Format(256, ((2, 2), (1, 12), (4, 8), (4, 32)), _decode_q5_k),
    "q6_k": Format(256, ((4, 32), (4, 16), (1, 16), (2, 1)), _decode_q6_k),
}

"""What is asked of all tokens of a vocabulary: the largest value, a filter's threshold, zeros."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jspec.kernels.device import prefers_unrolled_loops
from jspec.kernels.library import call, floats, in_cpp, is_available

_INT_BITS = 32
_GPU_DIGIT = 4  # bits


@in_cpp(
    "first_argmax",
    lambda values: (
        jax.ShapeDtypeStruct(values.shape[:-1], jnp.int32),
        floats(*values.shape[:-1]),
    ),
)
def first_argmax(
    values: Float32[Array, "... v"],
) -> tuple[Int32[Array, "..."], Float32[Array, "..."]]:
    """Returns the index of the largest value, the first one of equals, and that value.

    Where any value of a row is NaN, the largest value is NaN and the index is v.
    """
    size = values.shape[-1]
    if prefers_unrolled_loops():
        # XLA's argmax takes NaN as the largest. It is one kernel or two, where the reductions below
        # are five on a GPU.
        index = jnp.argmax(values, axis=-1).astype(jnp.int32)
        largest = jnp.take_along_axis(values, index[..., None], axis=-1)[..., 0]
        return jnp.where(jnp.isnan(largest), size, index), largest
    # NaN is looked for apart: XLA's maximum on CPU may skip it among thousands of numbers.
    has_nan = jnp.any(jnp.isnan(values), axis=-1, keepdims=True)
    largest = jnp.where(has_nan, jnp.nan, jnp.max(values, axis=-1, keepdims=True))
    # Two reductions, because XLA's own argmax on CPU takes four times as long.
    index = jnp.where(values == largest, jnp.arange(size, dtype=jnp.int32), size)
    return jnp.min(index, axis=-1), largest[..., 0]


@in_cpp("smallest_rank", lambda rank, *_: jax.ShapeDtypeStruct((*rank.shape[:-1], 1), jnp.int32))
def smallest_rank(
    rank: Int32[Array, "b t v"], weights: Float32[Array, "b t v"], target: Float32[Array, "b #t 1"]
) -> Int32[Array, "b t 1"]:
    """Returns the smallest threshold for which the weights of all ranks up to it reach the target.

    Where all weights together do not, it returns the largest integer. The rank of a likelier token
    is smaller, and weights are at least 0. Top-k and top-p both ask for it, and neither sorts: the
    threshold is an integer, whose digits are found exactly, the highest first: of one bit in JAX,
    of four on a GPU, where each digit costs launches and the sums for all of its values are one
    pass, and of eleven in C++.
    """
    bits = _GPU_DIGIT if prefers_unrolled_loops() else 1
    shifts = jnp.arange(_INT_BITS - bits, -1, -bits, dtype=jnp.uint32)
    # As integers that rise from 0, which have digits.
    rank = jax.lax.bitcast_convert_type(rank ^ jnp.int32(-(2**31)), jnp.uint32)

    def next_digit(
        low: UInt32[Array, "b t 1"], shift: UInt32[Array, ""]
    ) -> tuple[UInt32[Array, "b t 1"], None]:
        # One sum for each digit but the largest: of the ranks up to which it would come.
        ends = low[..., None] + (jnp.arange(1, 1 << bits, dtype=jnp.uint32)[:, None] << shift)
        kept = jnp.where(rank[..., None, :] < ends, weights[..., None, :], 0.0)
        is_enough = jnp.sum(kept, axis=-1) >= target
        digit = jnp.sum(~is_enough, axis=-1, keepdims=True, dtype=jnp.uint32)
        return low + (digit << shift), None

    start = jnp.zeros((*rank.shape[:-1], 1), jnp.uint32)
    threshold, _ = jax.lax.scan(next_digit, start, shifts, unroll=bits > 1)
    return jax.lax.bitcast_convert_type(threshold, jnp.int32) ^ jnp.int32(-(2**31))


def zeros_if(is_read: Bool[Array, ""] | bool, *shape: int) -> Float32[Array, "..."]:
    """Returns zeros; where nobody is to read them, C++ leaves that memory as it finds it.

    The drafts of 32 rows have 44 MB of distributions, which are of no use at temperature 0.
    """

    def zeros() -> Float32[Array, "..."]:
        return jnp.zeros(shape, jnp.float32)

    if not is_available():
        return zeros()
    return jax.lax.cond(is_read, zeros, lambda: call("unwritten", zeros, floats(*shape)))

"""The threshold of a filter: how far down the ranking tokens must be kept to reach a weight.

Top-k and top-p both ask for it. Neither sorts the vocabulary: the threshold is an integer, whose
digits are found exactly, the highest first: of one bit in JAX, of four on a GPU, where each digit
costs launches and the sums for all of its values are one pass, and for eleven in C++.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, UInt32

from jspec.kernels.device import prefers_unrolled_loops
from jspec.kernels.library import in_cpp

_INT_BITS = 32
_GPU_DIGIT = 4  # bits


@in_cpp("smallest_rank", lambda rank, *_: jax.ShapeDtypeStruct((*rank.shape[:-1], 1), jnp.int32))
def smallest_rank(
    rank: Int32[Array, "b t v"], weights: Float32[Array, "b t v"], target: Float32[Array, "b #t 1"]
) -> Int32[Array, "b t 1"]:
    """Returns the smallest threshold for which the weights of all ranks up to it reach the target.

    Where all weights together do not, it returns the largest integer. The rank of a likelier token
    is smaller, and weights are at least 0.
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

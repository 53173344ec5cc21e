"""The threshold of a filter: how far down the ranking tokens must be kept to reach a weight.

Top-k and top-p both ask for it. Neither sorts the vocabulary: the threshold is an integer, and its
32 bits are found exactly, by bisection in JAX or eleven bits at a time in C++.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jspec.kernels.library import in_cpp

_INT_BITS = 32


@in_cpp("smallest_rank", lambda rank, *_: jax.ShapeDtypeStruct((*rank.shape[:-1], 1), jnp.int32))
def smallest_rank(
    rank: Int32[Array, "b t v"], weights: Float32[Array, "b t v"], target: Float32[Array, "b #t 1"]
) -> Int32[Array, "b t 1"]:
    """Returns the smallest threshold for which the weights of all ranks up to it reach the target.

    Where all weights together do not, it returns the largest integer. The rank of a likelier token
    is smaller, and weights are at least 0.
    """

    def halve(
        _: Int32[Array, ""], bounds: tuple[Int32[Array, "b t 1"], Int32[Array, "b t 1"]]
    ) -> tuple[Int32[Array, "b t 1"], Int32[Array, "b t 1"]]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, rounded down, without overflow
        kept = jnp.where(rank <= middle, weights, 0.0)
        enough = jnp.sum(kept, axis=-1, keepdims=True) >= target
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    limits, shape = jnp.iinfo(jnp.int32), (*rank.shape[:-1], 1)
    start = tuple(jnp.full(shape, limit, jnp.int32) for limit in (limits.min, limits.max))
    return jax.lax.fori_loop(0, _INT_BITS, halve, start)[0]

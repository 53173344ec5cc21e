"""Many rounds on the device before the host looks again, to stream text and check stop strings."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jspec.speculation.types import ModelParams


def run_rounds(
    params: ModelParams,
    state: Any,
    num_rounds: Int32[Array, ""],
    *,
    step: Callable[[ModelParams, Any], tuple[Any, Any]],
    max_rounds: int,
) -> tuple[Any, Any, Int32[Array, ""]]:
    """Runs rounds until every row is done, `num_rounds` at most.

    `num_rounds` is traced, so that another number compiles nothing. The state, of rows or of beams,
    is meant to be donated. The infos of all rounds are stacked on a new first axis of `max_rounds`,
    and the last result is how many were run.
    """
    # A loop's carry has a fixed shape, so room for all infos is made before the first round.
    info = jax.eval_shape(step, params, state)[1]
    infos = jax.tree.map(lambda leaf: jnp.zeros((max_rounds, *leaf.shape), leaf.dtype), info)

    def is_wanted(carry: tuple[Array, Any, Any]) -> Array:
        index, state, _ = carry
        return (index < num_rounds) & ~state.is_done.all()

    def one_round(carry: tuple[Array, Any, Any]) -> tuple[Array, Any, Any]:
        index, state, infos = carry
        state, info = step(params, state)
        infos = jax.tree.map(lambda all_, new: all_.at[index].set(new), infos, info)
        return index + 1, state, infos

    index, state, infos = jax.lax.while_loop(is_wanted, one_round, (jnp.int32(0), state, infos))
    return state, infos, index

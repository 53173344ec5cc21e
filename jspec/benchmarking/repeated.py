"""Times what is too short to be timed once: many in one compiled loop, less the loop itself."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp

_SECONDS = 0.25  # of one measurement, about
_MOST_TURNS = 32
_Key = TypeVar("_Key", bound=Hashable)


def seconds_each(loop: Callable[[jax.Array], jax.Array], repeats: int = 5) -> float:
    """Returns the seconds of one turn of a loop, the median of several measurements.

    Args:
      loop: compiled; takes a number of turns. What it does besides is taken off.
      repeats: measurements.
    """
    loop(jnp.int32(1)).block_until_ready()  # compiles

    def seconds(num_turns: int) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(loop(jnp.int32(num_turns)))
        return time.perf_counter() - begin

    more = max(1, min(_MOST_TURNS, int(_SECONDS / seconds(1))))
    return statistics.median(seconds(1 + more) - seconds(1) for _ in range(repeats)) / more


def seconds_in_turn(
    loops: Mapping[_Key, Callable[[jax.Array], jax.Array]], repeats: int = 9
) -> list[dict[_Key, float]]:
    """Returns the seconds of a turn of each loop, time after time.

    What is measured one after the other bears comparison: a machine that slows down for a while
    slows all loops.
    """
    return [
        {key: seconds_each(loop, repeats=1) for key, loop in loops.items()} for _ in range(repeats)
    ]

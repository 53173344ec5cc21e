"""Times what is too short to be timed once: many in one compiled loop, less the loop itself."""

import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp

_USUAL_TURNS = 32  # of one measurement
_MOST_SECONDS = 0.12  # of one, about: of turns that take longer there are fewer
_LEAST_SECONDS = 0.005  # of one: of turns that take less there are more
_Key = TypeVar("_Key", bound=Hashable)
Loop: TypeAlias = Callable[[jax.Array], jax.Array]  # compiled; from a number of turns


def seconds_each(loop: Loop, repeats: int = 5) -> float:
    """Returns the seconds of one turn of a loop, the median of several measurements.

    Args:
      loop: what it does besides its turns is taken off.
      repeats: measurements.
    """
    return statistics.median(turn["it"] for turn in seconds_in_turn({"it": loop}, repeats))


def seconds_in_turn(loops: Mapping[_Key, Loop], repeats: int = 15) -> Iterator[dict[_Key, float]]:
    """Yields the seconds of a turn of each loop, time after time.

    What is measured one after the other bears comparison: a machine that slows down for a while
    slows all loops. Every other time the order is the reverse, as a loop also pays for what the one
    before it has left in the processor's caches.
    """
    counts = {key: _enough_turns(loop) for key, loop in loops.items()}
    for repeat in range(repeats):
        order = list(loops)[:: -1 if repeat % 2 else 1]
        seconds = {key: _seconds(loops[key], counts[key]) / counts[key] for key in order}
        yield {key: seconds[key] for key in loops}


def _enough_turns(loop: Loop) -> int:
    """Returns how many turns to measure at once."""
    _time_loop(loop, 1)  # compiles
    count = max(1, min(_USUAL_TURNS, int(_MOST_SECONDS / _time_loop(loop, 1))))
    while _seconds(loop, count) < _LEAST_SECONDS:
        count *= 2
    return count


def _seconds(loop: Loop, count: int) -> float:
    """Returns what so many turns take."""
    return _time_loop(loop, 1 + count) - _time_loop(loop, 1)


def _time_loop(loop: Loop, count: int) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(loop(jnp.int32(count)))
    return time.perf_counter() - begin


def with_first(array: jax.Array, number: jax.Array) -> jax.Array:
    """Replaces an array's first number, in place: one turn of a loop then waits for another."""
    return jax.lax.dynamic_update_slice(array, number.reshape([1] * array.ndim), [0] * array.ndim)

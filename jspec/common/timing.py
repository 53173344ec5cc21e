"""The one way to time: a call, a turn of a compiled loop, and compiling, which never counts.

JAX returns before the device has finished, so `timed` waits for the result. What is too short to be
timed once runs many times inside one compiled loop (`TurnLoop`); a run of the loop with a single
turn is taken off, so that neither the host's call nor its waiting counts. What is compared takes
turns: a machine that slows down for a while slows all alike.
"""

import functools
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Self, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

COMPILE_EVENTS = "/jax/core/compile/"  # prefix of JAX's events, one a stage of a compilation
_USUAL_TURNS = 32  # of one measurement
_MOST_SECONDS = 0.12  # of a measurement, about: of turns that take longer there are fewer
_LEAST_SECONDS = 0.005  # of a measurement: of turns that take less there are more
_Key = TypeVar("_Key", bound=Hashable)
_Result = TypeVar("_Result")
Loop: TypeAlias = Callable[[jax.Array], Any]
"""Compiled, from a number of turns: what the last turn leaves."""


def timed(do: Callable[[], _Result]) -> tuple[float, _Result]:
    """Returns the seconds until all that a function returns is there, and what it returns."""
    begin = time.perf_counter()
    result = jax.block_until_ready(do())
    return time.perf_counter() - begin, result


class TurnLoop:
    """A compiled loop over a number of turns.

    Args:
      turn: (constants, carry) -> carry; only what the carry depends on is sure to be computed.
      constants: arrays that every turn reads, such as a model's parameters.
      carry: what the first turn begins with. It is given away, so that caches in it are written in
        place; each run of the loop goes on from where the one before ended.
      options: XLA's; None takes its defaults.
    """

    def __init__(
        self,
        turn: Callable[[Any, Any], Any],
        constants: Any,
        carry: Any,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        def run(constants: Any, carry: Any, num_turns: jax.Array) -> Any:
            return jax.lax.fori_loop(0, num_turns, lambda _, carry: turn(constants, carry), carry)

        self._constants, self._carry = constants, carry
        self._run: Callable[..., Any] = jax.jit(
            run, donate_argnums=1, compiler_options=None if options is None else dict(options)
        )

    def __call__(self, num_turns: jax.Array) -> Any:
        """Runs that many turns; returns what the last one leaves."""
        self._carry = self._run(self._constants, self._carry, num_turns)
        return self._carry

    def trace(self) -> Callable[[], None]:
        """Traces it now; returns what compiles it, in any thread."""
        lowered = self._run.lower(self._constants, self._carry, jnp.int32(0))  # type: ignore[attr-defined]

        def compile_it() -> None:
            self._run = lowered.compile()

        return compile_it


def seconds_each(loop: Loop, repeats: int = 5) -> float:
    """Returns the seconds of one turn of a loop, the median over several measurements."""
    return statistics.median(turn["it"] for turn in seconds_in_turn({"it": loop}, repeats))


def least_seconds(loop: Loop, repeats: int = 6) -> float:
    """Returns the seconds of one turn of a loop, by the fastest of several runs."""
    # For a machine's limits, of which other work on the machine can only take away.
    count = _enough_turns(loop)
    runs = [(_run(loop, 1 + count), _run(loop, 1)) for _ in range(repeats)]
    long_run, short_run = map(min, zip(*runs, strict=True))
    return (long_run - short_run) / count


def seconds_in_turn(loops: Mapping[_Key, Loop], repeats: int = 15) -> Iterator[dict[_Key, float]]:
    """Yields the seconds of a turn of each loop, measurement after measurement."""
    counts = {key: _enough_turns(loop) for key, loop in loops.items()}
    for repeat in range(repeats):
        # A loop also pays for what the one before it has left in the processor's caches.
        order = list(loops)[:: -1 if repeat % 2 else 1]
        seconds = {key: _seconds(loops[key], counts[key]) / counts[key] for key in order}
        yield {key: seconds[key] for key in loops}


def _enough_turns(loop: Loop) -> int:
    """Returns the number of turns to measure at once."""
    _run(loop, 1)  # compiles
    count = max(1, min(_USUAL_TURNS, int(_MOST_SECONDS / _run(loop, 1))))
    while _seconds(loop, count) < _LEAST_SECONDS:
        count *= 2
    return count


def _seconds(loop: Loop, count: int) -> float:
    """Returns the seconds that a number of turns adds to a single turn."""
    return _run(loop, 1 + count) - _run(loop, 1)


def _run(loop: Loop, count: int) -> float:
    return timed(lambda: loop(jnp.int32(count)))[0]


def with_first(array: jax.Array, number: jax.Array) -> jax.Array:
    """Replaces an array's first number, in place: one turn of a loop then waits for another."""
    return jax.lax.dynamic_update_slice(array, number.reshape([1] * array.ndim), [0] * array.ndim)


class CompileClock:
    """Seconds spent on tracing, lowering and compiling, and programs compiled or fetched."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_programs = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith(COMPILE_EVENTS):
            self.seconds += duration_secs
            self.num_programs += event.endswith("backend_compile_duration")


@functools.cache
def compile_clock() -> CompileClock:
    """Returns the one clock of the process: JAX's listeners cannot be removed."""
    return CompileClock()


class Instant:
    """A moment on the wall clock and on the compile clock, in seconds."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()
        self.compile_seconds = compile_clock().seconds

    def run_seconds_since(self, earlier: Self) -> float:
        """Returns the seconds between two moments, without those spent on compiling."""
        compiled = self.compile_seconds - earlier.compile_seconds
        return max(self.seconds - earlier.seconds - compiled, 0.0)

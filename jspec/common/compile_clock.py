"""How long and how often JAX compiled, so that compile time never counts as run time."""

import functools
import time
from typing import Self

import jax

COMPILE_EVENTS = "/jax/core/compile/"
"""The prefix of JAX's events, one for each stage of a compilation."""


class CompileClock:
    """Totals since the clock was started.

    Attributes:
      seconds: time spent on tracing, lowering and compiling.
      num_programs: programs compiled, or fetched from the persistent cache.
    """

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

"""How far a long job has come, on standard error."""

import sys
import time

from jspec.common.errors import say

_SECONDS_APART, _SECONDS_APART_IN_PLACE = 5.0, 0.2


def counted(number: int, unit: str) -> str:
    """Returns how many there are: "1 cell", "2 cells"."""
    return f"{number} {unit}" if number == 1 else f"{number} {unit}s"


class Progress:
    """Prints a line every few seconds: what is finished, and the time left.

    The time left is estimated from the pace since this process began, whoever did the work;
    compilation makes the beginning slow.
    """

    def __init__(
        self, num_all: int, num_before: int, unit: str = "cell", *, in_place: bool = False
    ) -> None:
        """Begins a job of `num_all` units of work, of which `num_before` are finished already.

        `in_place` is for a short job: one line on a terminal, to which nothing else may write
        meanwhile, and no time left, as compiling is most of it.
        """
        self._is_short, self._in_place = in_place, in_place and sys.stderr.isatty()
        self._num_all, self._num_before, self._unit = num_all, num_before, unit
        self._begun = time.monotonic()
        self._printed = -_SECONDS_APART

    def show(self, num_finished: int, num_failed: int = 0) -> None:
        """Prints a line, unless the last line is fresh; the end always gets a line."""
        seconds = time.monotonic() - self._begun
        is_last = num_finished >= self._num_all
        apart = _SECONDS_APART_IN_PLACE if self._in_place else _SECONDS_APART
        if seconds - self._printed < apart and not is_last:
            return
        self._printed = seconds
        line = f"{min(num_finished, self._num_all)} of {counted(self._num_all, self._unit)}"
        if num_failed:
            line += f", {num_failed} failed"
        num_new = num_finished - self._num_before
        if num_new > 0 and not is_last and not self._is_short:
            left = seconds / num_new * (self._num_all - num_finished)
            line += f", about {format_seconds(left)} left"
        if self._in_place:  # erases what is longer than the new line
            print(f"\r{line}\033[K", end="\n" if is_last else "", file=sys.stderr, flush=True)
        else:
            say(line)


def format_seconds(seconds: float) -> str:
    """Returns a time for people: "40 s", "12 min", "3 h 05 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"

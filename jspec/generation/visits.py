"""How many rounds the device runs before the host looks at their tokens."""

import math

from jspec.generation.engine import MAX_ROUNDS_PER_VISIT

_SECONDS = 0.04  # of a visit: text comes 25 times a second


class VisitLength:
    """The number of rounds of the next visit of the device.

    A visit takes a millisecond or two besides its rounds: on a GPU as long as a round of a small
    model. So it has as many rounds as take 40 ms, by the visit before, at most twice as many as it.

    Attributes:
      least: number of rounds, however long they take.
      num_rounds: of the next visit.
    """

    def __init__(self, least: int, *, is_fixed: bool = False) -> None:
        """`is_fixed` keeps the least number, as processes must that run the same rounds."""
        self.least = self.num_rounds = least
        self._is_fixed = is_fixed

    def note(self, seconds: float, num_rounds: int) -> None:
        """Takes in how long a visit took, and how many rounds were run in it."""
        # None of a visit's seconds is left where a clock counts too much of compiling.
        if seconds <= 0 or num_rounds == 0 or self._is_fixed:
            return
        wanted = math.ceil(_SECONDS * num_rounds / seconds)
        most = min(2 * self.num_rounds, MAX_ROUNDS_PER_VISIT)  # one short visit may be an accident
        self.num_rounds = max(min(wanted, most), self.least)

"""Compares something with another, part by part and turn by turn: both saw the same machine."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from jspec.evaluation.benchmarking.repeated import Loop, seconds_in_turn

Parts = TypeVar("Parts", bound=tuple[float, ...])
"""Seconds: first of the whole, then of those of its parts that are measured by themselves."""


class Turn(NamedTuple, Generic[Parts]):
    """Parts of something and of what it is compared with, measured one after the other.

    Attributes:
      own: of the one in question.
      first: of the one that it is compared with.
    """

    own: Parts
    first: Parts

    @property
    def ratio(self) -> float:
        """Of the seconds of both wholes."""
        return self.own[0] / self.first[0]

    @property
    def expected_ratio(self) -> float:
        """The same, if they differ by their parts alone."""
        return 1 + (sum(self.own[1:]) - sum(self.first[1:])) / self.first[0]


def typical_parts(turns: Sequence[Turn[Parts]]) -> Parts:
    """Returns the median of each part of the one in question."""
    own = [turn.own for turn in turns]
    return type(own[0])(*map(statistics.median, zip(*own, strict=True)))


def take_turns(
    own: Mapping[str, Loop],
    first: Mapping[str, Loop],
    parts: Callable[..., Parts],
    repeats: int,
) -> list[Turn[Parts]]:
    """Measures every part, each beside the other's: right before it or right after it.

    Args:
      own: compiled loops over a number of times the whole, and each of its parts, by name.
      first: likewise; a part that is not there takes no time.
      parts: makes `Parts` of seconds by name.
      repeats: turns.
    """
    loops = {}
    for name in own:
        loops["own", name] = own[name]
        if name in first:
            loops["first", name] = first[name]
    return [
        Turn(*(parts(**{name: turn.get((one, name), 0.0) for name in own})
               for one in ("own", "first")))
        for turn in seconds_in_turn(loops, repeats)
    ]  # fmt: skip

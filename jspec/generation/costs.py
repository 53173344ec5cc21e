"""What rounds cost on this machine, which is an argument of a run."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from jspec.common.errors import InputError
from jspec.generation.stats import RoundCounts


@dataclasses.dataclass(frozen=True)
class RoundCosts:
    """Seconds that rounds take, by context, drafter and number of drafts.

    Attributes:
      contexts: numbers of cache slots for which they were measured, in increasing order.
      numbers: numbers of drafts.
      drafters: names of the drafters.
      seconds: seconds of a round, drafts and verify call, by context, drafter and number.
      reading: seconds per token that a drafter has not read yet and reads before it drafts, such as
        those of the prompt, by context and drafter; empty if no drafter reads anything.
    """

    contexts: tuple[int, ...]
    numbers: tuple[int, ...]
    drafters: tuple[str, ...]
    seconds: tuple[tuple[tuple[float, ...], ...], ...]
    reading: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        shape = len(self.contexts), len(self.drafters), len(self.numbers)
        _check_shape("costs", self.seconds, shape)
        if self.reading:
            _check_shape("seconds of reading", self.reading, shape[:2])
        if list(self.contexts) != sorted(set(self.contexts)):
            raise InputError(f"expected costs of rising contexts, got {list(self.contexts)}")
        if not all(0 < x < math.inf for x in np.ravel(self.seconds)):
            raise InputError("expected costs that are finite numbers of seconds above 0")
        if not all(0 <= x < math.inf for x in np.ravel(self.reading)):
            raise InputError("expected seconds of reading that are finite and not below 0")

    def at(self, context: int) -> np.ndarray:
        """Returns the seconds of a round with this many slots, [drafters numbers].

        Linear between the measured contexts and beyond the last; constant below the first.
        """
        return self._at(context, np.asarray(self.seconds, np.float64))

    def reading_at(self, context: int) -> np.ndarray:
        """Returns the seconds per unread token with this many slots, [drafters]."""
        if not self.reading:
            return np.zeros([len(self.drafters)], np.float32)
        return self._at(context, np.asarray(self.reading, np.float64))

    def _at(self, context: int, seconds: np.ndarray) -> np.ndarray:
        if len(self.contexts) == 1 or context <= self.contexts[0]:
            return seconds[0].astype(np.float32)
        last = int(np.searchsorted(self.contexts[1:-1], context)) + 1
        low, high = self.contexts[last - 1], self.contexts[last]
        share = (context - low) / (high - low)
        at = (1 - share) * seconds[last - 1] + share * seconds[last]
        return np.maximum(at, seconds[last - 1].min()).astype(np.float32)

    def plain_steps(self, rounds: Sequence[RoundCounts], context: int) -> float | None:
        """Returns what these rounds cost on average, in plain steps with this many slots.

        A round costs what the next larger measured number of its drafter's drafts does. None where
        there are no rounds, or drafts of a drafter that was not measured.
        """
        names = {one.drafter for one in rounds if one.num_proposed}
        if not rounds or not names <= set(self.drafters):
            return None
        seconds, most = self.at(context), len(self.numbers) - 1
        total = 0.0
        for one in rounds:
            row = self.drafters.index(one.drafter) if one.num_proposed else 0
            column = min(int(np.searchsorted(self.numbers, one.num_proposed)), most)
            total += float(seconds[row, column] / seconds[row, 0])
        return total / len(rounds)

    def to_json(self) -> dict[str, Any]:
        """Returns the costs as plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, record: Any) -> Self:
        """Returns the costs in a record of `to_json`.

        Raises:
          InputError: if the record is anything else.
        """
        try:
            return cls(
                contexts=tuple(map(int, record["contexts"])),
                numbers=tuple(map(int, record["numbers"])),
                drafters=tuple(map(str, record["drafters"])),
                seconds=tuple(tuple(tuple(map(float, c)) for c in b) for b in record["seconds"]),
                reading=tuple(tuple(map(float, b)) for b in record.get("reading", ())),
            )
        except InputError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            raise InputError(
                "expected costs of rounds, an object of contexts, numbers, drafters, seconds and "
                "reading as in settings.costs of an answer; got something else"
            ) from None


def _check_shape(name: str, values: Any, expected: tuple[int, ...]) -> None:
    try:
        found = np.asarray(values, float).shape
    except (TypeError, ValueError):
        found = "rows of different lengths"
    if found != expected or 0 in expected:
        raise InputError(f"expected {name} of shape {expected}, got {found}")


def read_costs(path: str) -> RoundCosts:
    """Returns the costs in a JSON file written from `RoundCosts.to_json`.

    Raises:
      InputError: if the file cannot be read or holds anything else.
    """
    try:
        return RoundCosts.from_json(json.loads(pathlib.Path(path).read_bytes()))
    except OSError as error:
        raise InputError(f"cannot read the costs in {path}: {error.strerror}") from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        reason = f"expected costs of rounds, a JSON object, got broken JSON ({error})"
        raise InputError(f"{path}: {reason}") from None

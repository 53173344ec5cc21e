"""What rounds cost on this machine: measured once, kept in a file, and an argument of a run."""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np

from jspec.common.errors import InputError


@dataclasses.dataclass(frozen=True)
class RoundCosts:
    """Seconds that rounds take, by context, drafter and number of drafts.

    Attributes:
      contexts: numbers of cache slots for which they were measured, in increasing order.
      numbers: numbers of drafts.
      drafters: names of the drafters.
      seconds: seconds of a round, drafts and verify call, [contexts][drafters][numbers].
      reading: seconds per token that a drafter has not read yet and reads before it drafts, such as
        those of the prompt, [contexts][drafters]; empty if no drafter reads anything.
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
        if not all(math.isfinite(x) and x > 0 for x in np.ravel(self.seconds)):
            raise InputError("expected costs that are finite numbers of seconds above 0")
        if not all(math.isfinite(x) and x >= 0 for x in np.ravel(self.reading)):
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


def recall_or_measure(
    path: pathlib.Path,
    key: Mapping[str, Any],
    measure: Callable[[], RoundCosts],
    check: Callable[[RoundCosts], None] = lambda costs: None,
) -> RoundCosts:
    """Returns the costs that a file holds under a key; measures and adds them if they are missing.

    A corrupt file is replaced, with a note on standard error. Where the file cannot be written,
    every start measures again.

    Args:
      path: path of the file.
      key: everything that the costs depend on, as plain values.
      measure: measures the costs.
      check: raises `InputError` for costs of something else; these are measured again.
    """
    name = json.dumps(key, sort_keys=True)
    entries, problem = _read(path)
    if problem is not None:
        print(f"note: {path} is corrupt ({problem}): begun anew", file=sys.stderr, flush=True)
    if name in entries:
        try:
            costs = RoundCosts.from_json(entries[name])
            check(costs)
            return costs
        except InputError as error:
            print(f"note: {path}: {error}: measuring anew", file=sys.stderr, flush=True)
    print(
        "measuring what rounds cost on this machine, once for these models and settings",
        file=sys.stderr,
        flush=True,
    )
    costs = measure()
    _write(path, _read(path)[0] | {name: costs.to_json()})
    return costs


def read_costs(path: str) -> RoundCosts:
    """Returns the costs in a JSON file written from `RoundCosts.to_json`.

    Raises:
      InputError: if the file cannot be read or holds anything else.
    """
    try:
        record = json.loads(pathlib.Path(path).read_bytes())
    except OSError as error:
        raise InputError(f"cannot read the costs in {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        reason = f"expected costs of rounds, a JSON object, got broken JSON ({error})"
        raise InputError(f"{path}: {reason}") from None
    try:
        return RoundCosts.from_json(record)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _read(path: pathlib.Path) -> tuple[dict[str, Any], str | None]:
    """Returns the entries of a file, none if it does not exist, and what is wrong with it."""
    try:
        if not path.exists():
            return {}, None
        entries = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return {}, str(error)
    return (entries, None) if isinstance(entries, dict) else ({}, "not an object")


def _write(path: pathlib.Path, entries: Mapping[str, Any]) -> None:
    """Replaces the file in one step, so that nobody reads half of it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(entries, indent=1), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        print(f"note: cannot keep costs in {path}: {error.strerror}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)

"""One server in several processes: process 0 decides, and broadcasts every call of its slots.

    process 0    HTTP, scheduler ──► LeadingSlots ──► BatchSlots ──► its devices
                                        │ each call, before it is made
    process 1    follow ◄───────────────┘             BatchSlots ──► its devices

What `BatchSlots` does follows from its calls alone: pages and prompts kept are the same everywhere,
and so are the programs that the devices run together. The other processes read no clock.
"""

import collections
import itertools
import signal
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from jspec.common import processes
from jspec.generation.answer import Round
from jspec.generation.rows import Row
from jspec.serving.slots import BatchSlots

_STOP = "stop"


class _Saved:
    """What process 0 knows of a slot that was paused: each process keeps the rest by its number."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Calls:
    """Makes calls of slots by their names; what `pause` saves is kept here, by a number."""

    def __init__(self, slots: BatchSlots) -> None:
        self.slots = slots
        self._saved: dict[int, Any] = {}
        self._numbers = itertools.count()

    def make(self, name: str, arguments: Sequence[Any]) -> Any:
        """Returns what the call returns; of `pause` the number of what is saved."""
        if name == "begin":
            row, request, number = arguments
            return self.slots.begin(row, request, None if number is None else self._saved[number])
        result = getattr(self.slots, name)(*arguments)
        if name != "pause" or result is None:
            return result
        number = next(self._numbers)
        self._saved[number] = result
        return number

    def forget(self, numbers: Iterable[int]) -> None:
        """Drops saved rows that are no longer needed."""
        for number in numbers:
            del self._saved[number]


class LeadingSlots:
    """Slots on the devices of all processes, called in process 0 alone; see `BatchSlots`.

    Attributes:
      tree: what was read of earlier prompts.
    """

    def __init__(self, slots: BatchSlots) -> None:
        self._calls, self.tree = _Calls(slots), slots.tree
        self._untold: list[tuple[str, tuple[Any, ...]]] = []
        self._unwanted = collections.deque[int]()  # numbers that nobody refers to any more

    def _call(self, name: str, *arguments: Any) -> Any:
        self._untold.append((name, arguments))
        if name != "reserve":  # which runs no program: it is told with the next call
            unwanted = [self._unwanted.popleft() for _ in range(len(self._unwanted))]
            processes.broadcast((self._untold, unwanted))
            self._untold = []
            self._calls.forget(unwanted)
        return None if name == _STOP else self._calls.make(name, arguments)

    @property
    def usage(self) -> float:
        """The share of pages that rows hold, 0 to 1."""
        return self._calls.slots.usage

    @property
    def rows(self) -> Sequence[int]:
        """Indices of the slots."""
        return self._calls.slots.rows

    def begin(self, row: int, request: Row, saved: _Saved | None = None) -> int | None:
        """See `BatchSlots.begin`."""
        return self._call("begin", row, request, saved and saved.number)

    def reserve(self, row: int, num_rounds: int, is_extra: bool = False) -> bool:
        """See `BatchSlots.reserve`."""
        return self._call("reserve", row, num_rounds, is_extra)

    def pause(self, row: int) -> _Saved | None:
        """See `BatchSlots.pause`."""
        number = self._call("pause", row)
        if number is None:
            return None
        saved = _Saved(number)
        # An answer that is cancelled while it waits drops this, and so the others' parts of it.
        weakref.finalize(saved, self._unwanted.append, number)
        return saved

    def read(self, row: int) -> tuple[int, Round | None]:
        """See `BatchSlots.read`."""
        return self._call("read", row)

    def run(self, num_rounds: int) -> float:
        """See `BatchSlots.run`."""
        return self._call("run", num_rounds)

    def rounds(self, row: int) -> Iterable[Round]:
        """See `BatchSlots.rounds`."""
        return self._calls.slots.rounds(row)

    def finish(self, row: int, answer: Sequence[int] = (), text: Sequence[int] = ()) -> None:
        """See `BatchSlots.finish`."""
        self._call("finish", row, answer if self._calls.slots.has_memory else (), text)

    def clear(self) -> None:
        """See `BatchSlots.clear`."""
        self._call("clear")

    def keep_alive(self) -> None:
        """Broadcasts a call that does nothing: a collective that waits for too long fails."""
        self._call("keep_alive")

    def stop(self) -> None:
        """Lets the other processes end."""
        self._call(_STOP)


def follow(slots: BatchSlots) -> None:
    """Makes the calls that process 0 broadcasts, until it stops; it alone handles signals."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    calls = _Calls(slots)
    while True:
        told, unwanted = processes.broadcast(None)
        calls.forget(unwanted)
        for name, arguments in told:
            if name == _STOP:
                return
            calls.make(name, arguments)

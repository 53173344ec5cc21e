"""What a profiler's trace says: how long each operation took, without those within it."""

import collections
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax

from jspec.common.errors import InputError

_PYTHON = "$"  # how Python's own frames begin
_NUMBER = re.compile(r"([._]\d+)+$")


class Event(NamedTuple):
    """One operation's run.

    Attributes:
      name: the operation.
      start: in nanoseconds.
      duration: in nanoseconds.
    """

    name: str
    start: float
    duration: float


def read_trace(folder: pathlib.Path) -> Iterator[tuple[str, list[Event]]]:
    """Yields each line of a trace that has operations: of devices, where there are some, else of
    the processor's threads.

    Raises:
      InputError: the profiler has written no trace.
    """
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise InputError(f"expected a trace in {folder}, got none")
    planes = list(jax.profiler.ProfileData.from_file(str(files[-1])).planes)
    found = {}
    for plane in planes:
        for line in plane.lines:
            events = [
                Event(event.name, event.start_ns, event.duration_ns)
                for event in line.events
                if not event.name.startswith(_PYTHON)
            ]
            if events:
                found[f"{plane.name} {line.name}"] = events
    devices = {name: events for name, events in found.items() if name.startswith("/device:")}
    yield from (devices or found).items()


def summarise_line(name: str, events: Iterable[Event]) -> dict[str, Any]:
    """Returns how long a line was busy, and each operation's runs and own time.

    Args:
      name: of the line.
      events: of the line; one lies within another, or beside it.
    """
    events = sorted(events, key=lambda event: (event.start, -event.duration))
    own: dict[str, float] = collections.defaultdict(float)
    runs: dict[str, int] = collections.defaultdict(int)
    busy, within = 0.0, []
    for event in events:
        kind = _NUMBER.sub("", event.name)
        while within and event.start >= within[-1].start + within[-1].duration:
            within.pop()
        if within:
            own[_NUMBER.sub("", within[-1].name)] -= event.duration
        else:
            busy += event.duration
        own[kind] += event.duration
        runs[kind] += 1
        within.append(event)
    span = max(event.start + event.duration for event in events) - events[0].start
    return {
        "line": name,
        "span_seconds": 1e-9 * span,
        "busy_seconds": 1e-9 * busy,
        "operations": [
            {"name": kind, "runs": runs[kind], "own_seconds": 1e-9 * own[kind]}
            for kind in sorted(own, key=lambda kind: -own[kind])
        ],
    }

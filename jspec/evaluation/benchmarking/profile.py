"""Shows where an answer's time goes, operation by operation, from one profiler trace.

An operation's own time is its time without those within it; operations whose names differ by
numbers only are added up. On a GPU a line is one of its streams, whose idle share is what launching
and the host cost; on a CPU it is a thread. The profiler slows down what it watches: shares count,
not times.
"""

import collections
import contextlib
import pathlib
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jspec.common.errors import InputError
from jspec.common.text_table import format_table
from jspec.evaluation.benchmarking.outcome import Outcome
from jspec.generation.generator import Generator
from jspec.generation.request import Request, Settings

_PYTHON = "$"  # how Python's own frames begin
_NUMBER = re.compile(r"([._]\d+)+$")
_TOP = 12  # operations shown of each line


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


def measure_profile(
    generator: Generator, context: int, settings: Settings, folder: str | None
) -> Iterator[Outcome]:
    """Answers once to compile and once under the profiler; yields the summary.

    Args:
      generator: what answers.
      context: tokens of the prompt, which are all the same.
      settings: of the answer.
      folder: keeps the trace, for a viewer such as XProf; None keeps none.

    Raises:
      InputError: the profiler has seen no operation.
    """
    request = Request([1] * context, settings)
    generator.generate(request)
    with contextlib.ExitStack() as stack:
        kept = folder or stack.enter_context(tempfile.TemporaryDirectory())
        with jax.profiler.trace(kept):
            stats = generator.generate(request).stats
        lines = [summarise_line(*line) for line in read_trace(pathlib.Path(kept))]
    if not lines:
        raise InputError("expected operations in the profiler's trace, got none")
    record = {
        "described": generator.describe(),
        "num_rounds": stats.num_rounds,
        "decode_seconds": stats.decode_seconds,
        "lines": lines,
    }
    title = f"{stats.num_rounds} rounds in {stats.decode_seconds:.3f} s, in the profiler"
    yield Outcome(record, "\n\n".join([title, *_format_lines(lines)]))


def _format_lines(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields a table of the longest operations of each line, the busiest line first."""
    for line in sorted(lines, key=lambda line: -line["busy_seconds"]):
        busy, span = line["busy_seconds"], line["span_seconds"]
        shown, rest = line["operations"][:_TOP], line["operations"][_TOP:]
        rows = [[one["name"][:80], f"{1e3 * one['own_seconds']:.2f}", str(one["runs"])]
                for one in shown]  # fmt: skip
        others = 1e3 * sum(one["own_seconds"] for one in rest)
        rows.append([f"{len(rest)} others", f"{others:.2f}", str(sum(o["runs"] for o in rest))])
        share = busy / span if span else 1.0
        title = f"{line['line']}: busy {1e3 * busy:.1f} of {1e3 * span:.1f} ms ({share:.0%})"
        yield f"{title}\n{format_table(['', 'own ms', 'runs'], rows)}"


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

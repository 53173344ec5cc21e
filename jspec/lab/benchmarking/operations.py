"""Where the time of a round goes: operation by operation, for batches of several sizes.

The device's time comes from JAX's profiler, which gives each operation of a compiled program its
own time. What an operation is for is read from the program: the part of the round from the scopes
in `speculation.round`, the kind from the kernel that it calls. The profiler itself takes
time for each, so a round is also timed without it.
"""

import collections
import pathlib
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from jspec.common.errors import InputError, say
from jspec.common.text_table import format_table, number_cell
from jspec.generation.generator import Generator
from jspec.generation.request import Request
from jspec.generation.result import Result
from jspec.lab.benchmarking.measurement import Measurement, Outcome, choose_prompts

_PROGRAM = "jit_run"  # of `speculation.plain.run_rounds`; prompts are read in others
_LEAST_SHOWN = 0.05  # milliseconds a round, of any column
_PARTS = ("draft", "target", "choice", "observe")  # scopes; the rest of a round is "commit"
_KINDS = {  # by the name of a C++ or CUDA function; others have their own
    "attention": "attention", "attend_pages": "attention", "cuda_attention": "attention",
    "write_rows": "cache", "write_pages": "cache",
}  # fmt: skip
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(\S+) = .*? ([a-z][a-z\-]*)\(")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_SCOPES = re.compile(r'op_name="([^"]*)"')


class Instruction(NamedTuple):
    """What a compiled program says of an operation: the part of a round, and the kind."""

    part: str
    kind: str


class Event(NamedTuple):
    """An operation that ran: its name, and its time in nanoseconds."""

    name: str
    begin: float
    end: float


def measure_operations(asked: Measurement) -> Iterator[Outcome]:
    """Profiles each method with each number of rows; yields after each."""
    # Programs in the cache of compiled ones may have been traced by an earlier version: their
    # scopes are not looked at when one is searched.
    jax.config.update("jax_enable_compilation_cache", False)
    target, draft = asked.models()
    prompts = [prompt.text for prompt in choose_prompts(asked)[0]]
    lines = list[dict[str, Any]]()
    for rows in asked.batch_sizes:
        requests = [Request(prompts[row % len(prompts)], asked.settings()) for row in range(rows)]
        for name in asked.methods:
            generator = asked.generators(target, draft, name, batch_size=rows)[name]
            line = {"name": name, "rows": rows} | _profiled(generator, requests)
            say(f"{name}, {rows} rows: {line['round_ms']:.3g} ms")
            lines.append(line)
            yield Outcome({"lines": lines}, _format(lines))


def _profiled(generator: Generator, requests: list[Request]) -> dict[str, Any]:
    def answer() -> list[Result]:
        generator.forget_answers()  # or the next run would copy them
        return generator.generate(requests)

    answer()  # compiles
    results = answer()
    num_rounds = _num_rounds(results)
    stats = [result.stats for result in results]
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            traced = answer()
        times = _times_by_operation(pathlib.Path(folder))
    per_round = {key: 1e-6 * value / _num_rounds(traced) for key, value in times.items()}
    return {
        "round_ms": 1e3 * max(row.device_seconds for row in stats) / num_rounds,
        # Of the row that began last: the others' times hold the reading of its prompt.
        "host_ms": 1e3 * min(s.decode_seconds - s.device_seconds for s in stats) / num_rounds,
        "num_rounds": num_rounds,
        "num_tokens": sum(len(result.token_ids) for result in results),
        "num_drafts": sum(row.num_proposed for row in stats),
        "operations_ms": [
            {"part": part, "kind": kind, "ms": value} for (part, kind), value in per_round.items()
        ],
    }


def _num_rounds(results: Iterable[Result]) -> int:
    """Returns the rounds of a batch whose rows begin together: those of the longest answer."""
    return max(1, *(result.stats.num_rounds for result in results))


def _times_by_operation(folder: pathlib.Path) -> dict[Instruction, float]:
    threads = list(_threads(folder))
    if not any(threads):
        raise InputError(
            f"expected operations of {_PROGRAM} in the profile, got none: the profiler of this "
            "device does not report them"
        )
    instructions = _instructions({event.name for events in threads for event in events})
    times: dict[Instruction, float] = collections.defaultdict(float)
    for events in threads:
        for event, nanoseconds in own_times(events):
            times[instructions.get(event.name, Instruction("commit", "XLA"))] += nanoseconds
    return dict(times)


def _threads(folder: pathlib.Path) -> Iterator[list[Event]]:
    """Yields the operations of rounds on each thread, or on each stream of a GPU."""
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                events = list[Event]()
                for event in line.events:
                    stats = dict(event.stats)
                    name, begin = stats.get("hlo_op"), event.start_ns
                    if stats.get("hlo_module") == _PROGRAM and name is not None:
                        events.append(Event(str(name), begin, begin + event.duration_ns))
                yield events


def own_times(events: Iterable[Event]) -> Iterator[tuple[Event, float]]:
    """Yields each event with its time, less that of the events inside it.

    A loop's event contains those of its body. All are of one thread.
    """
    open_events = list[list[Any]]()  # each with the time that is left to it
    for event in sorted(events, key=lambda event: (event.begin, -event.end)):
        while open_events and not (
            open_events[-1][0].begin <= event.begin and event.end <= open_events[-1][0].end
        ):
            yield tuple(open_events.pop())
        if open_events:
            open_events[-1][1] -= event.end - event.begin
        open_events.append([event, event.end - event.begin])
    while open_events:
        yield tuple(open_events.pop())


def _instructions(names: set[str]) -> Mapping[str, Instruction]:
    """Returns what the compiled programs in this process say of the operations.

    Several programs may have one name, as a Generator compiles rounds of several shapes. The newest
    one that has all of the operations is the one that ran.
    """
    best: dict[str, Instruction] = {}
    for executable in jax.devices()[0].client.live_executables():
        for module in executable.hlo_modules():
            if module.name == _PROGRAM:
                known = read_instructions(module.to_string())
                if len(known.keys() & names) >= len(best.keys() & names):
                    best = known
    return best


def read_instructions(text: str) -> dict[str, Instruction]:
    """Returns the part and kind of each instruction of a compiled program's text."""
    known = {}
    for line in text.splitlines():
        if (match := _INSTRUCTION.match(line)) is None:
            continue
        name, opcode = match.groups()
        scopes = _SCOPES.search(line)
        path = scopes[1].split("/") if scopes else []
        part = next((part for part in path if part in _PARTS), "commit")  # the outermost
        known[name] = Instruction(part, _kind(opcode, _TARGET.search(line), name))
    return known


def _kind(opcode: str, target: re.Match[str] | None, name: str) -> str:
    if target is not None:
        function = target[1].removeprefix("jspec_")
        if "product" in function:  # of floats, int8, packed, grouped
            return "product"
        return _KINDS.get(function, function)
    if opcode in ("dot", "convolution") or name.startswith(("dot", "gemm")):
        return "product"
    if opcode == "copy" or name.startswith("copy"):
        return "copy"
    return "loop" if opcode in ("while", "conditional", "call") else "XLA"


def _format(lines: list[dict[str, Any]]) -> str:
    cells: dict[tuple[str, str], dict[int, float]] = collections.defaultdict(dict)
    for column, line in enumerate(lines):
        for operation in line["operations_ms"]:
            cells[operation["part"], operation["kind"]][column] = operation["ms"]
    order = (*_PARTS, "commit")
    keys = sorted(cells, key=lambda key: (order.index(key[0]), -max(cells[key].values())))
    shown = [key for key in keys if max(cells[key].values()) >= _LEAST_SHOWN]
    rows = [[f"{part}: {kind}", *_row(cells[part, kind], len(lines))] for part, kind in shown]
    small = {
        column: sum(values.get(column, 0.0) for key, values in cells.items() if key not in shown)
        for column in range(len(lines))
    }
    rows.append(["others", *_row(small, len(lines))])
    for title, key in (("a round, without profiler", "round_ms"), ("the host, a round", "host_ms")):
        rows.append([title, *(number_cell(line[key], ".2f") for line in lines)])
    rows.append(
        ["drafts a round", *(f"{line['num_drafts'] / line['num_rounds']:.1f}" for line in lines)]
    )
    titles = ["milliseconds a round", *(f"{line['name']} x{line['rows']}" for line in lines)]
    return format_table(titles, rows)


def _row(values: Mapping[int, float], count: int) -> list[str]:
    return [number_cell(values.get(column), ".2f") for column in range(count)]

"""The folder of an experiment: what it holds, and where its numbers come from."""

import contextlib
import gzip
import json
import pathlib
import re
import shlex
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jspec.common.errors import InputError
from jspec.common.figures import Curves, Picture, draw
from jspec.common.json_lines import read_json
from jspec.generation.costs import RoundCosts
from jspec.lab.reports.document import Block, Code, Heading, Table, code

Record = dict[str, Any]

RESULTS = "results.jsonl"
PACKED = "results.jsonl.gz"  # what a published folder has instead
_PATH = re.compile(r"(?:/[\w.@+:, -]+|~|\.\.)(?:/[\w.@+:, -]+)+/?")


class Workdir(NamedTuple):
    """What a folder holds.

    Attributes:
      runs: one for each process that worked on it.
      done: finished cells, each once, in the order in which they were finished.
      failed: cells that failed and were not done later, each once.
      traces: of single generations; see `jspec.lab.analysis.trace`.
      notes: what was left out while reading.
      costs: of rounds, measured separately from the answers, by method and batch size.
    """

    config: Record
    runs: list[Record]
    done: list[Record]
    failed: list[Record]
    traces: list[Record]
    notes: list[str]
    costs: Mapping[str, Mapping[int, RoundCosts]]

    @property
    def num_cells(self) -> int:
        """How many cells the experiment has; 0 where its runs do not say."""
        return max((run.get("num_cells", 0) for run in self.runs), default=0)


def read_workdir(folder: pathlib.Path) -> Workdir:
    """Reads an experiment's folder.

    A line that is torn, as a killed run or a full disk leaves it, is left out and noted.

    Raises:
      InputError: no such folder, or no experiment's.
    """
    if not folder.is_dir():
        raise InputError(f"expected the folder of an experiment, got {folder}: no such folder")
    if not (folder / "config.json").exists():
        raise InputError(f"cannot read {folder / 'config.json'}: no such file")
    config = read_json(folder / "config.json")
    notes: list[str] = []
    runs = _read_lines(folder / "runs.jsonl", lambda value: isinstance(value, dict), notes)
    results = RESULTS if (folder / RESULTS).exists() else PACKED
    cells = _read_lines(folder / results, _is_cell, notes)
    done = {cell["cell"]: cell for cell in cells if cell["status"] == "done"}
    failed = {cell["cell"]: cell for cell in cells if cell["cell"] not in done}
    traces = [read_json(path) for path in sorted(folder.glob("trace*.json"))]
    costs = _read_costs(folder / "costs.json", notes)
    return Workdir(config, runs, list(done.values()), list(failed.values()), traces, notes, costs)


def _read_costs(path: pathlib.Path, notes: list[str]) -> dict[str, dict[int, RoundCosts]]:
    try:
        return {
            method: {int(size): RoundCosts.from_json(entry) for size, entry in entries.items()}
            for method, entries in read_json(path).items()
        }
    except (ValueError, AttributeError, RecursionError):
        notes.append(f"{path.name} is broken and was left out")
        return {}


def _read_lines(
    path: pathlib.Path, is_right: Callable[[Any], bool], notes: list[str]
) -> list[Record]:
    """Returns the objects of a JSONL file; none without the file. Wrong lines are noted."""
    values = []
    for number, line in enumerate(read_file(path).split(b"\n"), 1):
        value = None
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
        if is_right(value):
            values.append(value)
        elif line.strip():
            notes.append(f"line {number} of {path.name} is torn or broken and was left out")
    return values


def read_file(path: pathlib.Path) -> bytes:
    """Returns what a file holds, unpacked if its name ends in .gz; nothing without the file.

    Raises:
      InputError: it cannot be read or unpacked.
    """
    try:
        content = path.read_bytes() if path.exists() else b""
        return gzip.decompress(content) if content and path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:  # the last two, of a torn archive
        raise InputError(f"cannot read {path}: {error}") from None


def _is_cell(value: Any) -> bool:
    match value:
        case {"cell": str(), "status": "failed"}:
            return True
        case {"cell": str(), "status": "done", "key": dict(), "record": dict()}:
            return True
    return False


class View(NamedTuple):
    """What pictures name, and how their files are told apart: by a suffix.

    The model is "" where none was run, the temperature None for several or none.
    """

    title: str
    model: str
    machine: str
    date: str
    temperature: float | None = None
    suffix: str = ""

    def draw(
        self, name: str, panels: Sequence[Curves], title: str, caption: str = "", **options: bool
    ) -> Picture:
        """Returns the figure; see `jspec.common.figures.draw`."""
        at = "" if self.temperature is None else f"temperature {self.temperature:g}"
        parts = [part.replace(" ", "\xa0") for part in (self.model, at, self.machine, self.date)]
        subtitle = " · ".join(filter(None, (self.title, *parts)))
        name += self.suffix
        return draw(name, panels, title=title, subtitle=subtitle, caption=caption, **options)


def view_of(workdir: Workdir) -> View:
    """Returns what the pictures of a workdir name."""
    config, last = workdir.config, workdir.runs[-1] if workdir.runs else {}
    has_model = config.get("kind", "generate") in ("generate", "estimate")
    model = f"{config.get('target')} {config.get('dtype')}" if has_model else ""
    machine = "" if config.get("kind") == "theory" else _machine(last.get("environment") or {})
    title = " ".join(str(config.get("title") or "Experiment").split())
    return View(title, model, machine, str(last.get("started", ""))[:10])


def _machine(environment: Mapping[str, Any]) -> str:
    cores = f"{environment['cores']} cores" if environment.get("cores") else ""
    parts = dict.fromkeys(
        filter(None, (environment.get("processor"), cores, environment.get("device")))
    )
    return ", ".join(map(str, parts))


def origin_blocks(workdir: Workdir) -> list[Block]:
    """Returns the chapter."""
    argvs = filter(None, (run.get("argv") for run in workdir.runs))
    commands = [shlex.join(portable(list(map(str, argv)))) for argv in argvs]
    commands = [*dict.fromkeys(commands), "python -m jspec.report DIR"]
    of_all = f" of {workdir.num_cells}" if workdir.num_cells else ""
    counts = [f"{len(workdir.done)}{of_all} cells done, {len(workdir.failed)} failed."]
    seconds = [line["record"].get("seconds") for line in workdir.done]
    known = [float(line) for line in seconds if isinstance(line, int | float)]
    counts += [f"{sum(known) / 60:.1f} minutes of generating, compilation excluded."] * bool(known)
    items = [*_environments(workdir.runs), *counts, *workdir.notes]
    blocks: list[Block] = [Heading("How it was measured"), Code("\n".join(commands)), items]
    rows = [
        {"cell": code(line["cell"]), "error": code(line.get("error"))} for line in workdir.failed
    ]
    return [*blocks, Table("Failed cells", rows)] if rows else blocks


def _environments(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    dates: dict[str, list[str]] = {}
    for run in runs:
        environment, git = run.get("environment") or {}, run.get("git") or {}
        versions = {"python": environment.get("python"), **(environment.get("versions") or {})}
        parts = [_machine(environment), *(f"{name} {one}" for name, one in versions.items() if one)]
        if git.get("commit"):
            changed = ", with changes that are not committed" if git.get("is_dirty") else ""
            parts.append(f"git commit {code(str(git['commit'])[:12])}{changed}")
        date = str(run.get("started", ""))[:10]
        dates.setdefault(", ".join(filter(None, parts)), []).append(date)
    return [
        f"{' to '.join(sorted({min(days), max(days)}))}: {text}" for text, days in dates.items()
    ]


def portable(value: Any) -> Any:
    """Returns JSON values with a path's last name in the place of each path that is not relative.

    Of `--flag=PATH` the flag is kept, of a config the folder `configs`, of a workdir only "DIR".
    """
    if isinstance(value, Mapping):
        return {key: portable(one) for key, one in value.items()}
    if isinstance(value, list):
        return list(map(portable, value))
    if not isinstance(value, str):
        return value
    if value.startswith("--workdir="):
        return "--workdir=DIR"
    flag, equals, path = value.partition("=") if value.startswith("--") else ("", "", value)
    if not _PATH.fullmatch(path):
        return value
    kept = re.search(r"configs/[^/]+$", path)
    return f"{flag}{equals}{kept[0] if kept else path.rstrip('/').rsplit('/', 1)[-1]}"

"""The folder of an experiment: its config, its runs, its results, costs and traces."""

import contextlib
import gzip
import json
import pathlib
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jspec.common.errors import InputError
from jspec.generation.costs import RoundCosts

Record = dict[str, Any]

RESULTS = "results.jsonl"
PACKED = "results.jsonl.gz"  # what a published folder has instead


class Workdir(NamedTuple):
    """What a folder holds.

    Attributes:
      runs: one for each process that worked on it: when, where, with which versions.
      done: finished cells, each once, in the order in which they were finished.
      failed: cells that failed and were not done later, each once.
      traces: of single generations; see `jspec.evaluation.analysis.trace`.
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
    config = _read_object(folder / "config.json")
    notes: list[str] = []
    runs = _read_lines(folder / "runs.jsonl", lambda value: isinstance(value, dict), notes)
    results = RESULTS if (folder / RESULTS).exists() else PACKED
    cells = _read_lines(folder / results, _is_cell, notes)
    done = {cell["cell"]: cell for cell in cells if cell["status"] == "done"}
    failed = {cell["cell"]: cell for cell in cells if cell["cell"] not in done}
    traces = [_read_object(path) for path in sorted(folder.glob("trace*.json"))]
    measured = _read_object(folder / "costs.json") if (folder / "costs.json").exists() else {}
    costs = {
        method: {int(size): RoundCosts.from_json(entry) for size, entry in entries.items()}
        for method, entries in measured.items()
    }
    return Workdir(config, runs, list(done.values()), list(failed.values()), traces, notes, costs)


def _read_object(path: pathlib.Path) -> Record:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: expected an object, got broken JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected an object")
    return value


def _read_lines(
    path: pathlib.Path, is_right: Callable[[Any], bool], notes: list[str]
) -> list[Record]:
    """Returns the objects of a JSONL file; none without the file. Wrong lines are noted."""
    found = []
    for number, line in enumerate(read_file(path).split(b"\n"), 1):
        value = None
        with contextlib.suppress(ValueError):
            value = json.loads(line)
        if is_right(value):
            found.append(value)
        elif line.strip():
            notes.append(f"line {number} of {path.name} is torn or broken and was left out")
    return found


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

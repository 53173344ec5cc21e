"""The folder of an experiment: its config, its runs, its results, costs and traces."""

import gzip
import json
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

from jspec.common.errors import InputError
from jspec.generation.costs import RoundCosts

Record = dict[str, Any]

RESULTS = "results.jsonl"
PACKED = "results.jsonl.gz"  # in the place of the other, where a folder was published


class Workdir(NamedTuple):
    """What a folder holds.

    Attributes:
      config: of the experiment, plain values.
      runs: one a process that worked on it: when, where, with which versions.
      done: finished cells, each once, in the order in which they were finished.
      failed: cells that failed and were not done later, each once.
      traces: of single generations, as `scripts/trace.py` writes them.
      notes: what was left out while reading.
      costs: of rounds, measured apart from the answers, by way and batch size; empty where there
        are none.
    """

    config: Record
    runs: list[Record]
    done: list[Record]
    failed: list[Record]
    traces: list[Record]
    notes: list[str]
    costs: Mapping[str, Mapping[int, RoundCosts]]

    @property
    def num_cells(self) -> int | None:
        """How many cells the experiment has; None where its runs do not say."""
        said = [run.get("num_cells") for run in self.runs]
        return max((one for one in said if isinstance(one, int)), default=None)


def read_workdir(folder: pathlib.Path) -> Workdir:
    """Reads an experiment's folder.

    A line that is torn, as a killed run or a full disk leaves it, is left out and noted.

    Raises:
      InputError: no such folder, or no experiment's.
    """
    if not folder.is_dir():
        raise InputError(f"expected the folder of an experiment, got {folder}: no such folder")
    config = _read_object(folder / "config.json", "config.json")
    notes: list[str] = []
    runs = list(_read_lines(folder / "runs.jsonl", _is_object, notes))
    is_packed = (folder / PACKED).exists() and not (folder / RESULTS).exists()
    cells = list(_read_lines(folder / (PACKED if is_packed else RESULTS), _is_cell, notes))
    done = _by_name(cell for cell in cells if cell["status"] == "done")
    failed = _by_name(cell for cell in cells if cell["status"] != "done")
    traces = [_read_object(path, "a trace") for path in sorted(folder.glob("trace*.json"))]
    left = [cell for name, cell in failed.items() if name not in done]
    costs = _read_costs(folder / "costs.json", notes)
    return Workdir(config, runs, list(done.values()), left, traces, notes, costs)


def _read_costs(path: pathlib.Path, notes: list[str]) -> dict[str, dict[int, RoundCosts]]:
    """Returns the costs in a file, of which what is wrong is noted; none without the file."""
    costs: dict[str, dict[int, RoundCosts]] = {}
    if not path.exists():
        return costs
    try:
        for method, entries in _read_object(path, "costs").items():
            own = {int(size): RoundCosts.from_json(entry) for size, entry in entries.items()}
            costs[method] = own
    except (InputError, ValueError, AttributeError):
        notes.append(f"{path.name} is broken and was left out")
        return {}
    return costs


def _by_name(cells: Iterator[Record]) -> dict[str, Record]:
    return {cell["cell"]: cell for cell in cells}


def _read_object(path: pathlib.Path, what: str) -> Record:
    """Returns the object in a JSON file.

    Raises:
      InputError: there is none.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: expected {what}, got broken JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected an object")
    return value


def _read_lines(
    path: pathlib.Path, is_right: Callable[[Any], TypeGuard[Record]], notes: list[str]
) -> Iterator[Record]:
    """Yields the objects of a JSONL file, of which a wrong one is noted; none without the file."""
    for number, line in enumerate(read_file(path).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if is_right(value):
            yield value
        else:
            notes.append(f"line {number} of {path.name} is torn or broken and was left out")


def read_file(path: pathlib.Path) -> bytes:
    """Returns what a file holds, unpacked if its name ends in .gz; nothing without the file.

    Raises:
      InputError: it cannot be read, or is not packed as its name says.
    """
    try:
        content = path.read_bytes() if path.exists() else b""
        return gzip.decompress(content) if content and path.suffix == ".gz" else content
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: expected a gzip file, got a broken one ({error})") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def _is_object(value: Any) -> TypeGuard[Record]:
    return isinstance(value, dict)


def _is_cell(value: Any) -> TypeGuard[Record]:
    if not isinstance(value, dict) or not isinstance(value.get("cell"), str):
        return False
    if value.get("status") == "failed":
        return True
    parts = value.get("key"), value.get("record")
    return value.get("status") == "done" and all(isinstance(part, dict) for part in parts)

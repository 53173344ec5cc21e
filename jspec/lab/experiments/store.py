"""A workdir: finished cells, the processes that worked here, and locks on cells.

```
  config.json     the config; a workdir serves no other
  runs.jsonl      a line for each process that has worked here
  results.jsonl   a line for each finished cell
  locks           an empty file, whose bytes are locked (see `ByteLocks`)
```

A process locks a cell, looks whether it has been finished meanwhile, and appends the result before
it gives the lock back. The cell of a killed process is free again at once.
"""

import contextlib
import hashlib
import pathlib
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from jspec.common.errors import WorkdirError, say
from jspec.common.journal import Journal, Record
from jspec.common.work_dir import ByteLocks, check_or_write_config, make_workdir

DONE, FAILED = "done", "failed"
_CONFIG = "config.json"
_CONFIG_BYTE, _SETUP_BYTE, _FIRST_CELL_BYTE = 0, 1, 16  # of the lock file


def is_begun(folder: str) -> bool:
    """Whether a folder is the workdir of some config."""
    return (pathlib.Path(folder) / _CONFIG).exists()


class Store(contextlib.AbstractContextManager):
    """A workdir in use.

    Attributes:
      outcomes: "done" or "failed" by the names of cells. A cell that had failed before the workdir
        was opened is missing: it is tried again.
      runs: the records of `runs.jsonl` when the workdir was opened.
    """

    def __init__(self, folder: str, config: Mapping[str, Any]) -> None:
        """Opens the workdir of a config, as plain JSON, or begins it.

        Raises:
          WorkdirError: it belongs to another config, is damaged, published, or cannot be
            written.
        """
        self.folder = pathlib.Path(folder)
        if (self.folder / "results.jsonl.gz").exists():  # as `jspec.report --publish` writes it
            what = "published results (results.jsonl.gz), to which nothing is added"
            raise WorkdirError(f"{self.folder} holds {what}: expected another workdir")
        make_workdir(self.folder)
        results = self.folder / "results.jsonl"
        self._locks = ByteLocks(self.folder / "locks")
        with self._locks.hold(_CONFIG_BYTE):
            if not is_begun(folder) and results.exists() and results.stat().st_size:
                raise WorkdirError(f"{self.folder} holds results without their config.json")
            self._runs = Journal(self.folder / "runs.jsonl")
            self.runs = self._runs.read()
            check_or_write_config(self.folder / _CONFIG, config, command=self._command())
        self._results = Journal(results)
        records = self._results.read()
        self.outcomes = {
            str(record.get("cell")): DONE for record in records if record.get("status") == DONE
        }

    def _command(self) -> str:
        argv = next((run["argv"] for run in reversed(self.runs) if run.get("argv")), ())
        # A published folder calls the workdir "DIR", and a folder may have been moved.
        workdir = f"--workdir={self.folder}"
        return shlex.join(
            workdir if argument.startswith("--workdir=") else argument for argument in argv
        )

    def add(self, record: Record) -> None:
        """Appends the result of a cell; a `WorkdirError` says that it cannot be written."""
        self._note(self._results.append(record))

    def add_run(self, record: Record) -> None:
        """Appends what is known of this process to `runs.jsonl`."""
        self._runs.append(record)

    def _note(self, records: list[Record]) -> None:
        for record in records:
            name = str(record.get("cell"))
            if self.outcomes.get(name) != DONE:
                self.outcomes[name] = str(record.get("status"))

    @contextlib.contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Locks a cell; yields False if it is finished or another process has it."""
        digest = hashlib.sha256(name.encode()).digest()
        byte = _FIRST_CELL_BYTE + int.from_bytes(digest[:7], "big")
        if not self._locks.try_hold(byte):
            yield False
            return
        try:
            self._note(self._results.read())
            yield name not in self.outcomes
        finally:
            self._locks.release(byte)

    @contextlib.contextmanager
    def setup(self) -> Iterator[None]:
        """Keeps other processes waiting while something is made that all of them need."""
        if not self._locks.try_hold(_SETUP_BYTE):
            say("waiting for another process that prepares the workdir")
        with self._locks.hold(_SETUP_BYTE):
            yield

    def __exit__(self, *_: object) -> None:
        self._locks.close()


class FollowedStore:
    """A workdir in the processes of a run other than 0, which locks and writes."""

    def __init__(self, folder: str) -> None:
        self.folder = pathlib.Path(folder)

    def setup(self) -> contextlib.AbstractContextManager:
        """Takes no lock: process 0 broadcasts the result."""
        return contextlib.nullcontext()


AnyStore: TypeAlias = Store | FollowedStore

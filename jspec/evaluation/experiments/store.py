"""A workdir: what has been measured, by whom, and who is measuring what.

```
  config.json     the config; a workdir serves no other
  runs.jsonl      a line for each process that has worked here
  results.jsonl   a line for each finished cell
  locks           on its bytes lie the locks (see `locks`)
```

A process takes a cell by a lock, looks whether it has been finished meanwhile, and appends the
result before it gives the lock back: a cell is done once, by whichever process comes first, and the
cell of a killed process is free again at once.
"""

import contextlib
import hashlib
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Self

from jspec.common.config_file import check_or_write_config
from jspec.common.journal import Journal, Record
from jspec.common.locks import ByteLocks
from jspec.common.workdir_errors import WorkdirError

DONE, FAILED = "done", "failed"
_CONFIG = "config.json"
_FILES, _SETUP, _FIRST_CELL = 0, 1, 16  # bytes of the lock file


def is_begun(folder: str) -> bool:
    """Whether a folder is the workdir of some config."""
    return (pathlib.Path(folder) / _CONFIG).exists()


class Store:
    """A workdir in use.

    Attributes:
      folder: where it is.
      outcomes: "done" or "failed" by the names of cells. A cell that had failed before the workdir
        was opened is not there: it is tried again.
      runs: the records of `runs.jsonl` at the opening.
    """

    def __init__(self, folder: str, config: Mapping[str, Any]) -> None:
        """Opens a workdir, or begins one.

        Args:
          folder: where.
          config: as plain JSON.

        Raises:
          WorkdirError: it belongs to another config, its files are damaged, or cannot be written.
        """
        self.folder = pathlib.Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WorkdirError(f"cannot make the workdir {folder}: {error.strerror}") from None
        self._locks = ByteLocks(self.folder / "locks")
        with self._locks.hold(_FILES):
            self._check_config(config)
        self._results = self._journal("results.jsonl")
        self._runs = self._journal("runs.jsonl")
        records = self._results.read()
        self.outcomes = {str(one.get("cell")): DONE for one in records if one.get("status") == DONE}
        self.runs = self._runs.read()

    def _check_config(self, config: Mapping[str, Any]) -> None:
        path = self.folder / _CONFIG
        results = self.folder / "results.jsonl"
        if not path.exists() and results.exists() and results.stat().st_size:
            raise WorkdirError(f"{self.folder} holds results without their config.json")
        check_or_write_config(path, config)

    def _journal(self, name: str) -> Journal:
        return Journal(self.folder / name, lambda: self._locks.hold(_FILES))

    def refresh(self) -> None:
        """Takes notice of what other processes have finished."""
        self._note(self._results.read())

    def add(self, record: Record) -> None:
        """Appends the result of a cell.

        Raises:
          WorkdirError: it cannot be written.
        """
        self._note(self._results.append(record))

    def add_run(self, record: Record) -> None:
        """Appends what is known of this process to `runs.jsonl`."""
        self._runs.append(record)

    def _note(self, records: list[Record]) -> None:
        for one in records:
            name = str(one.get("cell"))
            if self.outcomes.get(name) != DONE:
                self.outcomes[name] = str(one.get("status"))

    @contextlib.contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Takes a cell, unless another process has it or it is finished; yields whether it did."""
        byte = _FIRST_CELL + int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        if not self._locks.try_hold(byte):
            yield False
            return
        try:
            self.refresh()
            yield name not in self.outcomes
        finally:
            self._locks.release(byte)

    @contextlib.contextmanager
    def setup(self) -> Iterator[None]:
        """Holds off other processes while something that all of them need is made."""
        if not self._locks.try_hold(_SETUP):
            print("waiting for another process that prepares the workdir", file=sys.stderr,
                  flush=True)  # fmt: skip
        with self._locks.hold(_SETUP):
            yield

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._locks.close()

"""Results as they are finished, one JSON object a line."""

import contextlib
import json
import os
import pathlib
from typing import Any, Self, TextIO

from jspec.errors import InputError


class JsonLinesWriter:
    """A file that is begun with its first record: a run that fails before it overwrites nothing."""

    def __init__(self, path: str) -> None:
        """Checks that the file can be written.

        Raises:
          InputError: it cannot.
        """
        if not path:
            raise InputError("expected a file to write to, got an empty path")
        if path.startswith("--"):
            raise InputError(f"expected a file to write to, got what looks like a flag: {path}")
        self._path = pathlib.Path(path)
        self._file: TextIO | None = None
        folder = self._path.parent
        if not folder.is_dir():
            raise InputError(f"cannot write {path}: there is no folder {folder}")
        if self._path.is_dir():
            raise InputError(f"cannot write {path}: it is a folder")
        if not os.access(self._path if self._path.exists() else folder, os.W_OK):
            raise InputError(f"cannot write {path}: permission denied")

    def write(self, record: dict[str, Any]) -> None:
        """Adds a record; it is on its way to the disk when this returns.

        Raises:
          InputError: the disk is full, or the like.
        """
        try:
            if self._file is None:
                self._file = self._path.open("w", encoding="utf-8")
            self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            self._abandon()
            raise InputError(f"cannot write {self._path}: {error.strerror}") from None

    def _abandon(self) -> None:
        """Closes the file, which would otherwise try once more to write what it holds."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

"""JSON, one object a line: read one by one, and written as results are finished."""

import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, Self, TextIO

from jspec.errors import InputError


def read_json_lines(path: str, what: str) -> Iterator[tuple[str, Any]]:
    """Yields each line's value after where it stands, "file:line"; empty lines are skipped.

    Args:
      path: of the file, or "-" for standard input.
      what: the file is to the user, for messages.

    Raises:
      InputError: an unreadable file or broken JSON.
    """
    name = "standard input" if path == "-" else path
    try:
        file = sys.stdin.buffer if path == "-" else open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise InputError(f"cannot read {what} {path}: {error.strerror}") from None
    with file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{name}:{number}", _parse(line, f"{name}:{number}")
        except OSError as error:
            raise InputError(f"cannot read {what} {path}: {error.strerror}") from None


def _parse(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeError:
        raise InputError(f"{where}: expected UTF-8, got invalid bytes") from None
    except ValueError as error:
        raise InputError(f"{where}: expected a JSON object, got broken JSON ({error})") from None
    except RecursionError:
        raise InputError(f"{where}: expected a JSON object, got broken JSON (nested)") from None


def check_unicode(text: str, where: str) -> str:
    """Returns a text of a JSON file.

    Raises:
      InputError: it is not all Unicode: JSON can spell half a character.
    """
    try:
        text.encode("utf-8")
    except UnicodeError:
        raise InputError(f"{where}: expected UTF-8, got invalid bytes") from None
    return text


def check_output(path: str) -> pathlib.Path:
    """Returns the path of a file that is to be written.

    Raises:
      InputError: it cannot be.
    """
    if not path:
        raise InputError("expected a file to write to, got an empty path")
    if path.startswith("--"):
        raise InputError(f"expected a file to write to, got what looks like a flag: {path}")
    file = pathlib.Path(path)
    if not file.parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {file.parent}")
    if file.is_dir():
        raise InputError(f"cannot write {path}: it is a folder")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise InputError(f"cannot write {path}: permission denied")
    return file


class JsonLinesWriter:
    """A file that is begun with its first record: a run that fails before it overwrites nothing."""

    def __init__(self, path: str) -> None:
        """Checks that the file can be written.

        Raises:
          InputError: it cannot.
        """
        self._path = check_output(path)
        self._file: TextIO | None = None

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

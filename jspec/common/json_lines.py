"""JSON, one object a line: read one by one, and written as results are finished."""

import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, Self, TextIO

from jspec.common.errors import InputError


def title_of(path: str) -> str:
    """Returns what a user calls a file that is read: its path, or standard input."""
    return "standard input" if path == "-" else path


def read_json_lines(path: str, what: str) -> Iterator[tuple[str, Any]]:
    """Yields each line's value after where it stands, "file:line"; empty lines are skipped.

    Args:
      path: of the file, or "-" for standard input.
      what: the file is to the user, for messages.

    Raises:
      InputError: an unreadable file or broken JSON.
    """
    name = title_of(path)
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
        raise InputError(
            f"{where}: expected a JSON object, got broken JSON ({_reason(error)})"
        ) from None
    except RecursionError:
        raise InputError(f"{where}: expected a JSON object, got broken JSON (nested)") from None


def _reason(error: ValueError) -> str:
    """Returns what is wrong with a line; where in it, by column: it has no lines of its own."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.pos + 1}"
    return str(error)


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


def check_output(path: str, *inputs: str | None) -> pathlib.Path:
    """Returns the path of a file that is to be written.

    Args:
      path: of the file.
      *inputs: paths that the program reads, "-" for standard input; None stands for none.

    Raises:
      InputError: it cannot be written, or is an input.
    """
    if not path:
        raise InputError("expected a file to write to, got an empty path")
    if path.startswith("--"):
        raise InputError(f"expected a file to write to, got what looks like a flag: {path}")
    if path == "-":
        raise InputError("expected a file to write to, got - for standard output")
    file = pathlib.Path(path)
    if not file.parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {file.parent}")
    if file.is_dir():
        raise InputError(f"cannot write {path}: it is a folder")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise InputError(f"cannot write {path}: permission denied")
    for source in inputs:
        if source is not None and _is_same_file(source, file):
            raise InputError(f"expected another file to write to than is read, got {path} for both")
    return file


def _is_same_file(source: str, file: pathlib.Path) -> bool:
    """Returns whether an input, "-" for standard input, is that very file, by any name."""
    try:
        descriptor = 0  # stays open when `sys.stdin` is closed
        return file.is_file() and os.path.samefile(descriptor if source == "-" else source, file)
    except OSError:  # no such input: whoever reads it says so
        return False


class JsonLinesWriter:
    """A file that is begun with its first record: a run that fails before it overwrites nothing."""

    def __init__(self, path: str, *inputs: str | None) -> None:
        """Checks that the file can be written; see `check_output`."""
        self._path = check_output(path, *inputs)
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

    def rewrite(self, record: dict[str, Any], *, is_complete: bool) -> None:
        """Puts a record, with `is_complete` in it, in the place of all that the file holds.

        Whoever reads the file, or kills the program, finds the one before or this one, whole. What
        is no file, such as a pipe, gets the complete record alone.

        Raises:
          InputError: the disk is full, or the like.
        """
        record = record | {"is_complete": is_complete}
        if self._path.exists() and not self._path.is_file():
            if is_complete:
                self.write(record)
            return
        goal = self._path.resolve()  # of a link
        new = goal.with_name(f"{goal.name}.new")
        try:
            new.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
            new.replace(goal)
        except OSError as error:
            new.unlink(missing_ok=True)
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

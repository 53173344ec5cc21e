"""JSON files of one object, and JSON Lines: read line by line, written as results are finished."""

import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, Self, TextIO

from jspec.common.errors import InputError
from jspec.common.new_files import new_file


def title_of(path: str) -> str:
    """Returns what a user calls an input file: its path, or standard input."""
    return "standard input" if path == "-" else path


def read_json_lines(path: str, what: str) -> Iterator[tuple[str, Any]]:
    """Yields the position "file:line" and the value of each line; empty lines are skipped.

    Raises:
      InputError: the file, "-" for standard input, cannot be read, or a line is not JSON; `what` is
        what the file is to the user.
    """
    try:
        file = sys.stdin.buffer if path == "-" else open(path, "rb")  # noqa: SIM115
        with file:
            for number, line in enumerate(file, 1):
                where = f"{title_of(path)}:{number}"
                if line.strip():
                    yield where, _parse(line, where)
    except OSError as error:
        raise InputError(f"cannot read {what} {path}: {error.strerror}") from None


def _parse(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeError:
        raise InputError(f"{where}: expected UTF-8, got invalid bytes") from None
    except json.JSONDecodeError as error:  # its text would say "line 1", of this line
        reason = f"{error.msg} at column {error.pos + 1}"
    except ValueError as error:
        reason = str(error)
    except RecursionError:
        reason = "nested"
    raise InputError(f"{where}: expected a JSON object, got broken JSON ({reason})")


def check_unicode(text: str, where: str) -> str:
    """Returns a text from JSON; raises an `InputError` for the half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeError:
        raise InputError(f"{where}: expected UTF-8, got invalid bytes") from None
    return text


def check_output(path: str, *inputs: str | None) -> pathlib.Path:
    """Returns the path of a file that is to be written.

    Raises:
      InputError: it cannot be written, or is one of the inputs, "-" for standard input.
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
    for source in filter(None, inputs if file.is_file() else ()):
        with contextlib.suppress(OSError):  # no such input: the code that reads it will say so
            # Descriptor 0 stays open when `sys.stdin` is closed.
            if os.path.samefile(0 if source == "-" else source, file):
                raise InputError(
                    f"expected another file to write to than is read, got {path} for both"
                )
    return file


class JsonLinesWriter:
    """Writes records to a file, which is opened by the first record.

    A run that fails before its first record leaves an older file as it was.
    """

    def __init__(self, path: str, *inputs: str | None) -> None:
        """Checks that the file can be written; see `check_output`."""
        self._path = check_output(path, *inputs)
        self._file: TextIO | None = None

    def write(self, record: dict[str, Any]) -> None:
        """Appends a record and flushes it; raises an `InputError` if the disk is full, say."""
        try:
            if self._file is None:
                self._file = self._path.open("w", encoding="utf-8")
            self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):
                self.__exit__()  # or the end of the program would try to write once more
            raise InputError(f"cannot write {self._path}: {error.strerror}") from None

    def rewrite(self, record: dict[str, Any], *, is_complete: bool) -> None:
        """Replaces the whole content by one record, with `is_complete` in it.

        A reader finds either record whole, the old or the new, even if the program is killed. An
        output that is not a regular file, such as a pipe, gets only the complete record. Raises as
        `write` does.
        """
        record = record | {"is_complete": is_complete}
        if self._path.exists() and not self._path.is_file():
            if is_complete:
                self.write(record)
            return
        try:
            with new_file(self._path.resolve()) as partial:  # of a link its target is replaced
                partial.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {self._path}: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file, an empty one if it is missing; else an `InputError`."""
    if path.exists() and not path.is_file():
        # A device or a pipe may have no end, or wait for ever.
        raise InputError(f"{path}: expected a file, got {_kind_of(path)}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise InputError(f"{path}: expected UTF-8, got invalid bytes") from None
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: damaged JSON ({error})") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _kind_of(path: pathlib.Path) -> str:
    return "a folder" if path.is_dir() else "a pipe" if path.is_fifo() else "a device"


def save_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Writes an object to a file, indented."""
    text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
    path.write_text(text, encoding="utf-8")

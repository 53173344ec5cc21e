"""A file of JSON lines that several processes append to, and that survives kills and full disks."""

import contextlib
import fcntl
import io
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from jspec.common.errors import WorkdirError, say

Record = dict[str, Any]


class Journal:
    """Appends whole records to a file and reads the new ones, under a lock on the file.

    What a killed process left of a line, at the end of the file, is cut off by the next process
    that looks; what a full disk left of one is cut off at once. The file is made when it is first
    needed. Every method raises a `WorkdirError` if the file cannot be read or written, or a line
    before the last one is no record. Of a file with a record that is not `is_own`, nothing is cut
    off.
    """

    def __init__(
        self, path: pathlib.Path, is_own: Callable[[Record], bool] = lambda record: True
    ) -> None:
        self._path, self._is_own = path, is_own
        self._offset = self._num_lines = 0  # of the part that has been read

    def read(self) -> list[Record]:
        """Returns the records that are new since the last call."""
        with self._open() as file:
            return self._read(file)

    def append(self, record: Record) -> list[Record]:
        """Appends a record, which is then on the disk; returns the new ones, this one included."""
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        with self._open() as file:
            records = self._read(file)
            self._write(file, line)
        return [*records, record]

    def cut(self, num_records: int) -> None:
        """Cuts off all but the first records."""
        with self._open() as file:
            self._read(file)
            file.seek(0)
            lines = file.read().splitlines(keepends=True)[:num_records]
            self._offset, self._num_lines = sum(map(len, lines)), len(lines)
            os.ftruncate(file.fileno(), self._offset)

    @contextlib.contextmanager
    def _open(self) -> Iterator[io.FileIO]:
        try:
            file = open(self._path, "a+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise WorkdirError(f"cannot write {self._path}: {error.strerror}") from None
        with file:
            fcntl.lockf(file, fcntl.LOCK_EX)  # closing the file gives the lock back
            yield file

    def _read(self, file: io.FileIO) -> list[Record]:
        if os.fstat(file.fileno()).st_size < self._offset:
            raise WorkdirError(f"{self._path} has been cut off by someone else")
        file.seek(self._offset)
        lines = io.BytesIO(file.read()).readlines()
        records: list[Record] = []
        for record in map(_parse, lines):
            if record is None:
                break
            records.append(record)
        self._offset += sum(map(len, lines[: len(records)]))
        self._num_lines += len(records)
        if len(records) < len(lines) - 1:
            where = f"{self._path}:{self._num_lines + 1}"
            raise WorkdirError(
                f"{where}: expected a JSON object, got a broken line; only the last one may be"
            )
        if len(records) < len(lines) and all(map(self._is_own, records)):
            say(f"note: {self._path}: its last line is torn, and cut off")
            os.ftruncate(file.fileno(), self._offset)
        return records

    def _write(self, file: io.FileIO, line: bytes) -> None:
        rest = memoryview(line)
        try:
            while rest:  # the system may take less than it is given
                rest = rest[os.write(file.fileno(), rest) :]
            os.fsync(file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(file.fileno(), self._offset)
            raise WorkdirError(
                f"cannot write {self._path}: {error.strerror}; what was finished before is kept, "
                f"and the same command goes on from there"
            ) from None
        self._offset += len(line)
        self._num_lines += 1


def _parse(line: bytes) -> Record | None:
    """Returns the record in a whole line; None if there is none."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None

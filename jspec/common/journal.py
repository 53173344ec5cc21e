"""A file of JSON lines that several processes append to, and that a kill or a full disk spares."""

import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from jspec.common.workdir_errors import WorkdirError

Record = dict[str, Any]


class Journal:
    """Reads what is new and appends whole lines, under a lock.

    A line is there or it is not: what a killed process left of one, at the end of the file, is cut
    off by whoever comes next, and what a full disk took of one is cut off at once.
    """

    def __init__(
        self, path: pathlib.Path, lock: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Prepares; nothing is read yet.

        Args:
          path: of the file; it is made if need be.
          lock: holds off the other processes that read or append.
        """
        self._path, self._lock = path, lock
        self._offset = self._num_lines = 0

    def read(self) -> list[Record]:
        """Returns the records that came since the last time.

        Raises:
          WorkdirError: a line that is no record, before the last one; or the file cannot be read.
        """
        with self._lock(), self._open() as file:
            return self._read(file)

    def append(self, record: Record) -> list[Record]:
        """Appends a record; it is on the disk when this returns.

        Returns:
          The records that came since the last time, this one included.

        Raises:
          WorkdirError: it cannot be written; then it is not there.
        """
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        with self._lock(), self._open() as file:
            records = self._read(file)
            self._write(file, line)
        return [*records, record]

    def cut(self, num_records: int) -> None:
        """Cuts off all but the first records.

        Raises:
          WorkdirError: see `read`.
        """
        with self._lock(), self._open() as file:
            self._read(file)
            lines = _read_bytes(file, 0).splitlines(keepends=True)[:num_records]
            self._offset, self._num_lines = sum(map(len, lines)), len(lines)
            os.ftruncate(file, self._offset)

    @contextlib.contextmanager
    def _open(self) -> Iterator[int]:
        try:
            file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise WorkdirError(f"cannot write {self._path}: {error.strerror}") from None
        try:
            yield file
        finally:
            os.close(file)

    def _read(self, file: int) -> list[Record]:
        *lines, tail = self._new_bytes(file).split(b"\n")
        records, size = [], self._offset
        for index, line in enumerate(lines):
            record = _parse(line)
            if record is None and index + 1 == len(lines) and not tail:
                tail = line
                break
            if record is None:
                raise WorkdirError(
                    f"{self._path}:{self._num_lines + index + 1}: expected a JSON object, got a "
                    f"broken line; only the last one may be"
                )
            records.append(record)
            size += len(line) + 1
        if tail:
            print(f"note: {self._path}: its last line is torn, and cut off",
                  file=sys.stderr, flush=True)  # fmt: skip
            os.ftruncate(file, size)
        self._offset, self._num_lines = size, self._num_lines + len(records)
        return records

    def _new_bytes(self, file: int) -> bytes:
        if os.fstat(file).st_size < self._offset:
            raise WorkdirError(f"{self._path} has been cut off by someone else")
        return _read_bytes(file, self._offset)

    def _write(self, file: int, line: bytes) -> None:
        """Writes a line, at once where the system does."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(file, rest) :]
            os.fsync(file)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(file, self._offset)
            raise WorkdirError(
                f"cannot write {self._path}: {error.strerror}; what was finished before is kept, "
                f"and the same command goes on from there"
            ) from None
        self._offset += len(line)
        self._num_lines += 1


def _read_bytes(file: int, place: int) -> bytes:
    pieces = []
    while piece := os.pread(file, 1 << 24, place):
        pieces.append(piece)
        place += len(piece)
    return b"".join(pieces)


def _parse(line: bytes) -> Record | None:
    """Returns the record in a line; None where there is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None

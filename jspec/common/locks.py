"""Locks between processes that vanish with their holder.

They lie on single bytes of one file (POSIX record locks): thousands of cells need one file, and
none is left over. The system gives a byte back the moment its holder ends, be it by SIGKILL, and no
child of the holder keeps it, as it would keep a lock of `flock`. A process excludes other
processes, not itself, and closing the file anywhere in it gives up all its locks: one `ByteLocks` a
file.
"""

import contextlib
import errno
import fcntl
import os
import pathlib
from collections.abc import Iterator

from jspec.common.workdir_errors import WorkdirError


class ByteLocks:
    """The locks on the bytes of a file; the file stays empty."""

    def __init__(self, path: pathlib.Path) -> None:
        """Opens the file, or makes it.

        Raises:
          WorkdirError: it cannot be opened.
        """
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise WorkdirError(f"cannot write {path}: {error.strerror}") from None

    def try_hold(self, byte: int) -> bool:
        """Takes a byte's lock, unless another process has it; returns whether it did."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        return True

    def release(self, byte: int) -> None:
        """Gives a byte's lock back."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)

    @contextlib.contextmanager
    def hold(self, byte: int) -> Iterator[None]:
        """Holds a byte's lock, waiting for it."""
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, byte)
        try:
            yield
        finally:
            self.release(byte)

    def close(self) -> None:
        """Gives all locks back."""
        os.close(self._file)

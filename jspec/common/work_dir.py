"""Work directories: the config that one belongs to, and locks between the processes in it."""

import contextlib
import fcntl
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from jspec.common.errors import WorkdirError
from jspec.common.new_files import new_file

_MOST_NAMED = 5
_ABSENT = "absent"


def make_workdir(path: pathlib.Path) -> None:
    """Makes a work directory unless it is there; raises a `WorkdirError` if that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WorkdirError(f"cannot make the workdir {path}: {error.strerror}") from None


def check_or_write_config(
    path: pathlib.Path, plain: Mapping[str, Any], *, command: str = ""
) -> None:
    """Writes a config, as JSON values, to a file, or checks that the file holds this very config.

    The command, if it is known, is the one that continues the folder as it is.

    Raises:
      WorkdirError: it cannot be written, or holds another config; then it names what differs.
    """
    if not path.exists():
        write_json(path, plain)
        return
    try:
        theirs = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise WorkdirError(f"cannot read {path}: {error}") from None
    if isinstance(theirs, dict):
        theirs.pop("theory", None)  # a field of earlier experiments, of no effect today
    differences = list(_differences(theirs, plain))
    if differences:
        more = f", and {len(differences) - _MOST_NAMED} more" * (len(differences) > _MOST_NAMED)
        raise WorkdirError(
            f"{path.parent} belongs to another config: {', '.join(differences[:_MOST_NAMED])}{more}"
            "; take another --workdir" + f", or continue this one with: {command}" * bool(command)
        )


def _differences(theirs: Any, ours: Any, name: str = "") -> Iterator[str]:
    """Yields what differs between two configs, "FIELD is THEIRS there and OURS here"."""
    if not (isinstance(theirs, Mapping) and isinstance(ours, Mapping)):
        if theirs != ours:
            yield f"{name} is {_show(theirs)} there and {_show(ours)} here"
        return
    for key in dict.fromkeys((*theirs, *ours)):
        inner = f"{name}.{key}" if name else str(key)
        yield from _differences(theirs.get(key, _ABSENT), ours.get(key, _ABSENT), inner)
    if set(theirs) == set(ours) and list(theirs) != list(ours):
        yield f"the order of {name or 'the fields'} is {_show(list(theirs))} there"


def _show(value: Any) -> str:
    return value if value == _ABSENT else json.dumps(value, ensure_ascii=False)


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a JSON file, which appears, or replaces an older file, when it is complete."""
    try:
        with new_file(path) as partial, partial.open("w", encoding="utf-8") as file:
            file.write(json.dumps(value, ensure_ascii=False, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise WorkdirError(f"cannot write {path}: {error.strerror}") from None


class ByteLocks:
    """Locks between processes, on single bytes of one empty file (POSIX record locks).

    Thousands of cells need one file, and none is left over. The system gives a byte back the
    moment its holder ends, be it by SIGKILL, and no child inherits it, as it would a lock of
    `flock`. A process excludes other processes, not itself; closing the file anywhere in a process
    gives up all its locks, hence one `ByteLocks` per file.
    """

    def __init__(self, path: pathlib.Path) -> None:
        """Opens the file, or makes it; raises a `WorkdirError` if that cannot be."""
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise WorkdirError(f"cannot write {path}: {error.strerror}") from None

    def try_hold(self, byte: int) -> bool:
        """Takes a byte's lock unless another process has it; returns whether it did."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, by the system
            return False
        return True

    def release(self, byte: int) -> None:
        """Gives a byte's lock back."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)

    @contextlib.contextmanager
    def hold(self, byte: int) -> Iterator[None]:
        """Holds a byte's lock, after waiting for it."""
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, byte)
        try:
            yield
        finally:
            self.release(byte)

    def close(self) -> None:
        """Gives all locks back."""
        os.close(self._file)

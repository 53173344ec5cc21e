"""Verdicts: which of several names a trial has chosen, kept in the user's cache for the machine.

A verdict is reached once, by one thread of one process; then it is read from the file. It holds for
the driver, the jaxlib and the sources of kernels that it was reached with. Processes take turns:
two trials at once would disturb each other's times. So where a mark says that a trial was begun,
and no process holds the lock, the trial has ended its process.
"""

import concurrent.futures
import contextlib
import contextvars
import functools
import hashlib
import importlib.metadata
import pathlib
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax

from jspec.common.errors import InputError, describe_error
from jspec.common.json_lines import read_json
from jspec.common.user_cache import cache_dir, keep, note, only_one, read_kept
from jspec.kernels.backend import is_foreign, run_options

Verdict = dict[str, Any]  # "choice", and why: "seconds", "faults" by name; see `contest.Contest`

_VERDICTS: dict[str, Verdict] = {}  # of this process
_LOCKS: dict[str, threading.Lock] = {}  # by a verdict's key, so that it is reached once
_IS_TRIAL = contextvars.ContextVar("is a trial", default=False)
_FILE = threading.Lock()  # of this process's threads none drops what another one has added
_DRIVER = pathlib.Path("/proc/driver/nvidia/version")
_PATIENCE = 600.0  # seconds of a trial, after which the device is taken to hang
_MINUTE = 60.0  # after which Ctrl-C may be somebody's answer to a device that hangs
_SUFFIXES = {".py", ".cc", ".h", ".cu", ".cuh"}


def choose(key: Any, names: Sequence[str], reach: Callable[[], Verdict]) -> str:
    """Returns which of several names a verdict chooses: already reached, kept, or new.

    For a device that is not here nothing can be tried, and of several processes each would decide
    by its own clock: there it is the first. The key's representation must say all that matters but
    the options of the program. A trial that ends the process is remembered, and not begun again.
    """
    if is_foreign() or jax.process_count() > 1:
        return names[0]
    return decide(key, names, reach)["choice"]


def decide(key: Any, names: Sequence[str], reach: Callable[[], Verdict]) -> Verdict:
    """Returns the verdict; see `choose`. In a process it is reached once: other threads wait."""
    digest = hashlib.sha256(repr((key, run_options())).encode()).hexdigest()[:32]
    with _LOCKS.setdefault(digest, threading.Lock()):
        if digest not in _VERDICTS:
            verdict = _recall(digest, names)
            if verdict is None or verdict.get("is_unfinished"):
                with _TURN.taken():
                    verdict = _recall_or_reach(digest, names, reach)
            _VERDICTS[digest] = verdict
        return _VERDICTS[digest]


def _recall_or_reach(digest: str, names: Sequence[str], reach: Callable[[], Verdict]) -> Verdict:
    verdict = _recall(digest, names)  # another process may have reached it meanwhile
    if verdict is None:
        return _reach_and_keep(digest, reach, names[0])
    if verdict.get("is_unfinished"):
        remedy = f"remove {_path()} to try again"
        note(f"note: a trial ended its process: {names[0]} is taken; {remedy}")
    return verdict


class _Turn:
    """The turn of a process to try, which all of its threads share: a trial may need another."""

    def __init__(self) -> None:
        self._lock, self._num_trials = threading.Lock(), 0
        self._held = contextlib.ExitStack()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Waits for the turn. Where no file can be locked, processes do not wait."""
        with self._lock:
            if self._num_trials == 0:
                with contextlib.suppress(InputError, OSError):
                    path = _path().with_suffix(".lock")
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self._held.enter_context(only_one(path, "tries kernels on this device"))
            self._num_trials += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_trials -= 1
                if self._num_trials == 0:
                    self._held.close()


_TURN = _Turn()


def is_trial() -> bool:
    """Returns whether what is being computed belongs to a trial, and to no answer."""
    return _IS_TRIAL.get()


def _reach_and_keep(digest: str, reach: Callable[[], Verdict], otherwise: str) -> Verdict:
    """Reaches a verdict, and keeps it, unless it has a problem.

    Raises:
      InputError: the device gives no answer; the next start takes `otherwise`.
    """
    if not _keep(digest, {"choice": otherwise, "is_unfinished": True}):
        return _reach(reach, otherwise)
    begin = time.monotonic()
    try:
        verdict = _reach(reach, otherwise)
    except BaseException:  # an early Ctrl-C is no fault of a kernel
        if time.monotonic() - begin < _MINUTE:
            _keep(digest, None)
        raise
    _keep(digest, None if "problem" in verdict else verdict)
    return verdict


def _reach(reach: Callable[[], Verdict], otherwise: str) -> Verdict:
    """Reaches a verdict at once, although the caller is being traced: a new thread traces nothing.

    Where that fails, for want of memory say, the verdict has the problem in it, and is not kept.
    Nothing waits for the thread of a device that hangs: it is a daemon.
    """
    future = concurrent.futures.Future[Verdict]()

    def reach_in_thread() -> None:
        _IS_TRIAL.set(True)  # in the thread's own context
        try:
            future.set_result(reach())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=reach_in_thread, daemon=True).start()
    concurrent.futures.wait([future], _PATIENCE)
    if not future.done():
        raise InputError(
            f"expected a trial of kernels to end within {_PATIENCE:.0f} s, got no answer from the "
            f"device: start again, and {otherwise} is taken"
        )
    try:
        return future.result()
    except Exception as error:
        problem = describe_error(error)[:200]
        note(f"jspec: the trial failed ({problem}); {otherwise} is taken")
        return {"choice": otherwise, "problem": problem}


def _recall(key: str, names: Collection[str]) -> Verdict | None:
    """Returns a verdict that chooses one of the names; None without one for this very machine."""
    try:
        path = _path()
    except InputError:  # no home folder
        return None
    verdict = _entry_here(read_kept(path), path)["verdicts"].get(key)
    if verdict is None or (isinstance(verdict, dict) and verdict.get("choice") in names):
        return verdict
    note(f"note: {path}: expected a verdict under {key}, got {verdict!r:.50}: tried again")
    return None


def _keep(key: str, verdict: Verdict | None) -> bool:
    """Adds a verdict to the file, or removes it; those of another driver or source are dropped.

    The result is False where the file cannot be written, and a line has said so.
    """
    try:
        path = _path()
    except InputError as error:
        note(f"note: cannot keep verdicts: {error}")
        return False
    entries: dict[str, Any] = {}
    with _FILE:
        with contextlib.suppress(InputError):  # damaged: a line has said so
            entries = read_json(path)  # others may have written meanwhile
        entry = _entry_here(entries, path)
        entry["verdicts"].pop(key, None)
        if verdict is not None:
            entry["verdicts"][key] = verdict
        return keep(path, entries | {jax.devices()[0].device_kind: entry}, "verdicts")


def _entry_here(entries: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """Returns the device's entry in a file, or an empty entry, with a line that says why."""
    kind, machine = jax.devices()[0].device_kind, _machine()
    entry = entries.get(kind)
    if entry is None:
        return {"machine": machine, "verdicts": {}}
    is_whole = isinstance(entry, dict) and isinstance(entry.get("verdicts"), dict)
    before = entry.get("machine") if is_whole else None
    if before == machine:
        return entry
    reason = "damaged"
    if isinstance(before, dict):
        changed = [name for name in machine if before.get(name) != machine[name]]
        reason = ", ".join(f"{name} {before.get(name)}, now {machine[name]}" for name in changed)
    _note_once(f"note: {path}: {reason}: trials are made again")
    return {"machine": machine, "verdicts": {}}


_note_once = functools.cache(note)


def _path() -> pathlib.Path:
    return cache_dir() / "kernels.json"


@functools.cache
def _machine() -> dict[str, str]:
    """Returns what may change the verdicts on one kind of device."""
    jaxlib = importlib.metadata.version("jaxlib")
    sources = sources_digest(pathlib.Path(__file__).parent)
    return {"driver": driver_version(), "jaxlib": jaxlib, "sources": sources}


def sources_digest(folder: pathlib.Path) -> str:
    """Returns a digest of the sources in a folder: Python, C++ and CUDA C++."""
    sources = (path for path in sorted(folder.rglob("*")) if path.suffix in _SUFFIXES)
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def driver_version() -> str:
    """Returns the version of the NVIDIA driver, or of what JAX runs the device by."""
    with contextlib.suppress(OSError):  # of another maker, or none
        if match := re.search(r"\b\d+(\.\d+)+\b", _DRIVER.read_text()):
            return match[0]
    return " ".join(jax.devices()[0].client.platform_version.split())

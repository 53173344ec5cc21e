"""Verdicts: which of several names a trial has chosen, kept in the user's cache for the machine.

A verdict is reached once, by one thread of one process; then it is read from the file. It holds for
the driver, the jaxlib and the sources of kernels that it was reached with. Processes take turns:
two trials at once would disturb each other's times. So where a mark says that a trial was begun,
and no process holds the lock, the trial did not end. (Where files cannot be locked, processes do
not wait for each other, and one may see the mark of another that is still trying.)
"""

import concurrent.futures
import contextlib
import contextvars
import dataclasses
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

from jspec.common.errors import InputError, describe_error, say
from jspec.common.json_lines import read_json
from jspec.common.user_cache import cache_dir, keep, only_one
from jspec.kernels.backend import is_foreign, run_options

Verdict = dict[str, Any]  # "choice", and why: "seconds", "faults" by name; see `contest.Contest`

_VERDICTS: dict[str, Verdict] = {}  # of this process
_LOCKS: dict[str, threading.Lock] = {}  # by a verdict's key, so that it is reached once
# The latest trial of each key, and when it was begun, once it is.
_TRIALS: dict[str, tuple[concurrent.futures.Future[Verdict], list[float]]] = {}
_IS_TRIAL = contextvars.ContextVar("is a trial", default=False)
_wait = concurrent.futures.wait  # is interrupted by Ctrl-C
_FILE = threading.Lock()  # of this process's threads none drops what another one has added
_DRIVER = pathlib.Path("/proc/driver/nvidia/version")
_PATIENCE = 600.0  # seconds of a trial, after which the device is taken to hang
_LONG = 300.0  # after which Ctrl-C may be somebody's answer to a device that hangs
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
    """Returns the verdict; see `choose`. In a process it is reached once: other threads wait.

    Raises:
      InputError: the device gives no answer, or a kernel has left it unusable; the next start takes
        the first name.
    """
    digest = hashlib.sha256(repr((key, run_options())).encode()).hexdigest()[:32]
    with _LOCKS.setdefault(digest, threading.Lock()):
        if digest not in _VERDICTS:
            verdict = _recall(digest, names)
            if verdict is None or verdict.get("is_unfinished"):
                verdict = _in_thread(digest, functools.partial(_try, digest, names, reach), names)
            _VERDICTS[digest] = verdict
        return _VERDICTS[digest]


def is_trial() -> bool:
    """Returns whether what is being computed belongs to a trial, and to no answer."""
    return _IS_TRIAL.get()


def _in_thread(digest: str, run: Callable[[], Verdict], names: Sequence[str]) -> Verdict:
    """Runs a trial in a new thread, which traces nothing, although the caller is being traced.

    Nothing waits for the thread of a device that hangs: it is a daemon. The turn is the thread's.
    In a notebook it goes on after Ctrl-C, and whoever asks again waits for it.
    """
    if digest not in _TRIALS or _TRIALS[digest][0].done():
        _TRIALS[digest] = concurrent.futures.Future(), []
        threading.Thread(target=_run_trial, args=(run, *_TRIALS[digest]), daemon=True).start()
    future, begun = _TRIALS[digest]

    def seconds() -> float:
        return time.monotonic() - begun[0] if begun else 0.0

    try:
        while not future.done():
            _wait([future], min(1.0, _PATIENCE))
            if seconds() > _PATIENCE and not future.done():
                expected = f"expected a trial of kernels to end within {_PATIENCE:.0f} s"
                again = f"start again, and {names[0]} is taken"
                raise InputError(f"{expected}, got no answer from the device: {again}")
    except KeyboardInterrupt:
        if begun and seconds() < _LONG:  # no fault of a kernel
            _keep(digest, None)
        raise
    return future.result()


def _run_trial(
    run: Callable[[], Verdict], future: concurrent.futures.Future[Verdict], begun: list[float]
) -> None:
    _IS_TRIAL.set(True)  # in the thread's own context
    try:
        with _TURN.taken():
            begun.append(time.monotonic())
            future.set_result(run())
    except BaseException as error:
        future.set_exception(error)


def _try(digest: str, names: Sequence[str], reach: Callable[[], Verdict]) -> Verdict:
    # Another process may have reached it meanwhile. What is wrong with the file was said before.
    verdict = _recall(digest, names, tell=lambda text: None)
    if verdict is None:
        return _reach_and_keep(digest, reach, names[0])
    if verdict.get("is_unfinished"):
        say(f"note: a trial did not end: {names[0]} is taken; remove {_path()} to try again")
    return verdict


@dataclasses.dataclass
class _Turn:
    """The turn of a process to try, which all of its threads share: a trial may need another."""

    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    num_trials: int = 0
    held: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Waits for the turn. Where no file can be locked, processes do not wait."""
        with self.lock:
            if self.num_trials == 0:
                with contextlib.suppress(InputError, OSError):
                    path = _path().with_suffix(".lock")
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self.held.enter_context(only_one(path, "tries kernels"))
            self.num_trials += 1
        try:
            yield
        finally:
            with self.lock:
                self.num_trials -= 1
                if self.num_trials == 0:
                    self.held.close()


_TURN = _Turn()


def _reach_and_keep(digest: str, reach: Callable[[], Verdict], otherwise: str) -> Verdict:
    """Reaches a verdict and keeps it, unless there is a problem, want of memory say."""
    is_marked = _keep(digest, {"choice": otherwise, "is_unfinished": True})
    try:
        verdict = reach()
    except Exception as error:
        problem = describe_error(error)[:200]
        say(f"jspec: the trial failed ({problem}); {otherwise} is taken")
        verdict = {"choice": otherwise, "problem": problem}
    except BaseException:
        _keep(digest, None)
        raise
    if is_marked:
        _keep(digest, None if "problem" in verdict else verdict)
    if lost := verdict.get("is_lost"):
        raise InputError(f"{otherwise} fails after another kernel did ({lost}): start again")
    return verdict


def _recall(
    key: str, names: Collection[str], tell: Callable[[str], object] = say
) -> Verdict | None:
    """Returns a verdict that chooses one of the names; None without one for this very machine."""
    try:
        path = _path()
    except InputError:  # no home folder
        return None
    entries: dict[str, Any] = {}
    try:
        entries = read_json(path)
    except InputError as error:
        tell(f"note: {error}: begun anew")
    verdict = _entry_here(entries, path)["verdicts"].get(key)
    if verdict is None or (isinstance(verdict, dict) and verdict.get("choice") in names):
        return verdict
    tell(f"note: {path}: expected a verdict under {key}, got {verdict!r:.50}: tried again")
    return None


def _keep(key: str, verdict: Verdict | None) -> bool:
    """Adds a verdict to the file, or removes it; those of another driver or source are dropped.

    The result is False where the file cannot be written, and a line has said so.
    """
    try:
        path = _path()
    except InputError as error:
        say(f"note: cannot keep verdicts: {error}")
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


_note_once = functools.cache(say)


def _path() -> pathlib.Path:
    return cache_dir() / "kernels.json"


@functools.cache
def _machine() -> dict[str, str]:
    """Returns what may change the verdicts on one kind of device."""
    jaxlib = importlib.metadata.version("jaxlib")
    sources = sources_digest(pathlib.Path(__file__).parent)
    return {"driver": _driver_version(), "jaxlib": jaxlib, "sources": sources}


def sources_digest(folder: pathlib.Path) -> str:
    """Returns a digest of the sources in a folder: Python, C++ and CUDA C++."""
    sources = (path for path in sorted(folder.rglob("*")) if path.suffix in _SUFFIXES)
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def _driver_version() -> str:
    """Returns the version of the NVIDIA driver, or of what JAX runs the device by."""
    with contextlib.suppress(OSError):  # of another maker, or none
        if match := re.search(r"\b\d+(\.\d+)+\b", _DRIVER.read_text()):
            return match[0]
    return " ".join(jax.devices()[0].client.platform_version.split())

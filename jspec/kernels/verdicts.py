"""Verdicts of trials, kept in the user's cache for the machine that they were reached on."""

import contextlib
import functools
import hashlib
import importlib.metadata
import pathlib
import re
import threading
from collections.abc import Collection
from typing import Any

import jax

from jspec.common.errors import InputError
from jspec.common.json_lines import read_json
from jspec.common.kept import keep, note, read_kept
from jspec.common.user_cache import cache_dir

Verdict = dict[str, Any]  # "choice", and why: "seconds", "faults" by name; see `contest.Contest`

_FILE = threading.Lock()  # of this process's threads none drops what another one has added
_DRIVER = pathlib.Path("/proc/driver/nvidia/version")
_SUFFIXES = {".py", ".cc", ".h", ".cu", ".cuh"}


def recall_verdict(key: str, names: Collection[str]) -> Verdict | None:
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


def keep_verdict(key: str, verdict: Verdict | None) -> bool:
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
    """Returns the device's entry in a file, or an empty one, with a line that says why."""
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


@functools.cache
def _note_once(text: str) -> None:
    note(text)


def kept_where() -> str:
    """Returns what removes all verdicts, for a person."""
    return f"remove {_path()} to try again"


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
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in _SUFFIXES:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def driver_version() -> str:
    """Returns the version of the NVIDIA driver, or of what JAX runs the device by."""
    with contextlib.suppress(OSError):  # of another maker, or none
        if match := re.search(r"\b\d+(\.\d+)+\b", _DRIVER.read_text()):
            return match[0]
    return " ".join(jax.devices()[0].client.platform_version.split())

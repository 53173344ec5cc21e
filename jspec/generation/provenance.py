"""Where and with what a measurement was made, and the JSON line that it leaves."""

import contextlib
import datetime
import functools
import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess
from collections.abc import Mapping
from typing import Any

from jspec import kernels
from jspec.common.json_lines import JsonLinesWriter

_PACKAGES = ("jspec", "jax", "jaxlib", "flax", "numpy", "transformers", "torch")


def environment() -> dict[str, Any]:
    """Returns date, device, processor, C++ library and versions."""
    return {
        "date": datetime.date.today().isoformat(),
        **kernels.describe_device(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


class Recorder:
    """Writes a measurement as a JSON line: `environment()`, `flags`, and what was measured.

    A program that is killed, or fails, leaves the line of what it had measured by then, in which
    `is_complete` is false.
    """

    def __init__(self, path: str | None, flags: Mapping[str, Any], *inputs: str | None) -> None:
        """Checks the file that will be written, unless it is None; it is none of the inputs.

        Raises:
          InputError: the file cannot be written.
        """
        self._output = None if path is None else JsonLinesWriter(path, *inputs)
        self._flags = dict(flags)

    def save(self, measured: Mapping[str, Any], *, is_complete: bool = True) -> dict[str, Any]:
        """Replaces the line by that of all that has been measured so far, and returns it.

        Raises:
          InputError: the disk is full, or the like.
        """
        record = environment() | {"flags": self._flags} | dict(measured)
        if self._output is not None:
            self._output.rewrite(record, is_complete=is_complete)
        return record


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _processor() -> str:
    """Returns the processor's name, from Linux where it is Linux."""
    with contextlib.suppress(OSError):
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
        if match := re.search(r"^model name\s*: (.+)$", text, re.MULTILINE):
            return match[1].strip()
    return platform.processor() or platform.machine()


def git_state() -> dict[str, Any] | None:
    """Returns the commit of jspec's checkout, if any, and whether files differ from it."""
    here = pathlib.Path(__file__)
    git = functools.partial(
        subprocess.check_output, cwd=here.parent, stderr=subprocess.DEVNULL, text=True
    )
    try:
        git(["git", "ls-files", "--error-unmatch", here.name])  # not a checkout of something else
        commit = git(["git", "rev-parse", "HEAD"]).strip()
        changes = git(["git", "status", "--porcelain", "--untracked-files=no"])
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"commit": commit, "is_dirty": bool(changes)}

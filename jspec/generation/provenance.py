"""Where and with what a measurement was made, and the JSON line that it leaves."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
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
    """Writes a measurement to a file, as one JSON line: `environment()`, `flags`, and what was
    measured.

    A program that is killed, or fails, leaves the line of what it had measured by then, in which
    `is_complete` is false.
    """

    def __init__(self, path: str | None, flags: Mapping[str, Any], *inputs: str | None) -> None:
        """Checks that the file can be written.

        Args:
          path: of the file; None writes nothing.
          flags: what decides what is measured.
          *inputs: files that are read; none of them may be the file.

        Raises:
          InputError: the file cannot be written.
        """
        self._output = None if path is None else JsonLinesWriter(path, *inputs)
        self._flags = dict(flags)

    def save(self, measured: Mapping[str, Any], *, is_complete: bool = True) -> None:
        """Replaces the line by that of all that has been measured so far.

        Raises:
          InputError: the disk is full, or the like.
        """
        if self._output is not None:
            record = environment() | {"flags": self._flags} | dict(measured)
            self._output.rewrite(record, is_complete=is_complete)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """Returns the processor's name, from Linux where it is Linux."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def git_state() -> dict[str, Any] | None:
    """Returns the commit of the checkout that jspec runs from, and whether files differ from it.

    None where it runs from no checkout.
    """
    here = pathlib.Path(__file__)

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(here.parent), *arguments], capture_output=True, check=True, text=True
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # a checkout of something else is none
        return {
            "commit": git("rev-parse", "HEAD"),
            "is_dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.CalledProcessError):
        return None

"""Where and with what a measurement was made, and the JSON line that it leaves."""

import functools
import pathlib
import subprocess
from collections.abc import Mapping
from typing import Any

from jspec.common.json_lines import JsonLinesWriter
from jspec.kernels import environment


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

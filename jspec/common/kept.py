"""What was measured once, kept in a JSON file of the user's cache."""

import contextlib
import os
import pathlib
import sys
import threading
from typing import Any

from jspec.common.errors import InputError
from jspec.common.json_lines import read_json, save_json


def note(text: str) -> None:
    """Prints a line on standard error."""
    print(text, file=sys.stderr, flush=True)


def read_kept(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a file; an empty one where it is missing or, with a note, damaged."""
    try:
        return read_json(path)
    except InputError as error:
        note(f"note: {error}: begun anew")
        return {}


def keep(path: pathlib.Path, entries: dict[str, Any], what: str) -> bool:
    """Replaces the file in one step, so that nobody reads half of it.

    Where it cannot be written, a note says that `what` is not kept, and the result is False.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_json(temporary, entries)
        temporary.replace(path)
        return True
    except OSError as error:
        note(f"note: cannot keep {what} in {path}: {error.strerror}")
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        return False

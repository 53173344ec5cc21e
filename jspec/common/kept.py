"""What was measured once, kept in a JSON file of the user's cache."""

import pathlib
import sys
from typing import Any

from jspec.common.errors import InputError
from jspec.common.json_lines import read_json, save_json
from jspec.common.new_files import new_file


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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as partial:
            save_json(partial, entries)
        return True
    except OSError as error:
        note(f"note: cannot keep {what} in {path}: {error.strerror}")
        return False

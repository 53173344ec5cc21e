"""JSON files that hold one object, such as a config.json."""

import json
import pathlib
from typing import Any

from jspec.common.errors import InputError


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file; a missing file counts as an empty object.

    Raises:
      InputError: the file cannot be read, is not JSON, or holds something other than an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: damaged JSON ({error})") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Writes an object to a file, indented."""
    text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
    path.write_text(text, encoding="utf-8")

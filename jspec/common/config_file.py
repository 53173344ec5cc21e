"""The config that a workdir belongs to: `config.json`."""

import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from jspec.common.workdir_errors import WorkdirError

_MOST_NAMED = 5
_ABSENT = "absent"


def check_or_write_config(path: pathlib.Path, plain: Mapping[str, Any]) -> None:
    """Writes a config to a file, or checks that the file holds that very config.

    Args:
      path: of the file.
      plain: the config as JSON has it.

    Raises:
      WorkdirError: it holds another one; the message names the fields that differ and both values.
    """
    if not path.exists():
        write_json(path, plain)
        return
    try:
        theirs = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise WorkdirError(f"cannot read {path}: {error}") from None
    found = list(differences(theirs, plain))
    if found:
        more = f", and {len(found) - _MOST_NAMED} more" * (len(found) > _MOST_NAMED)
        raise WorkdirError(
            f"{path.parent} belongs to another config: {', '.join(found[:_MOST_NAMED])}{more}; "
            "take another --workdir"
        )


def differences(theirs: Any, ours: Any, name: str = "") -> Iterator[str]:
    """Yields what differs between two configs, "FIELD is THEIRS there and OURS here"."""
    if not (isinstance(theirs, Mapping) and isinstance(ours, Mapping)):
        if theirs != ours:
            yield f"{name} is {_show(theirs)} there and {_show(ours)} here"
        return
    for key in dict.fromkeys((*theirs, *ours)):
        inner = f"{name}.{key}" if name else str(key)
        yield from differences(theirs.get(key, _ABSENT), ours.get(key, _ABSENT), inner)
    if set(theirs) == set(ours) and list(theirs) != list(ours):
        yield f"the order of {name or 'the fields'} is {_show(list(theirs))} there"


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a JSON file; it appears, or replaces an older one, when it is complete.

    Raises:
      WorkdirError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(json.dumps(value, ensure_ascii=False, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise WorkdirError(f"cannot write {path}: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)


def _show(value: Any) -> str:
    return value if value == _ABSENT else json.dumps(value, ensure_ascii=False)

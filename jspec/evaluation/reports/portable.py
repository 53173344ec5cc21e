"""Texts without the folders of the machine that they come from: reports are published."""

import re
from collections.abc import Mapping
from typing import Any

_PATH = re.compile(r"(?:/[\w.@+:, -]+|~|\.\.)(?:/[\w.@+:, -]+)+/?")


def portable(value: Any) -> Any:
    """Returns plain values with a path's last name in the place of each path that is not relative.

    Of `--flag=PATH` the flag is kept, of a config the folder `configs`, of a workdir only "DIR".

    Args:
      value: as JSON has it.
    """
    if isinstance(value, Mapping):
        return {key: portable(one) for key, one in value.items()}
    if isinstance(value, list):
        return [portable(one) for one in value]
    return _portable_text(value) if isinstance(value, str) else value


def _portable_text(text: str) -> str:
    if text.startswith("--workdir="):
        return "--workdir=DIR"
    flag, equals, path = text.partition("=") if text.startswith("--") else ("", "", text)
    if not _PATH.fullmatch(path):
        return text
    kept = re.search(r"configs/[^/]+$", path)
    return f"{flag}{equals}{kept[0] if kept else path.rstrip('/').rsplit('/', 1)[-1]}"

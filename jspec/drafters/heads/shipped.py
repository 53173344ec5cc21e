"""Trained heads that come with jspec, each for one target; `shipped_heads/` holds their folders."""

import pathlib

from jspec.common.errors import InputError
from jspec.weights.published import SMOLLM2

_PREFIX = "shipped:"
_FOLDER = pathlib.Path(__file__).parent / "shipped_heads"
_HEADS = {("eagle", SMOLLM2): SMOLLM2}  # of a drafter and what its target is asked for by


def shipped_head(drafter: str, target: str) -> str | None:
    """Returns the `draft_head` that comes with jspec for a drafter and a target's name, or None."""
    name = _HEADS.get((drafter, target))
    return None if name is None else _PREFIX + name


def find_head(head: str) -> pathlib.Path:
    """Returns the folder that `draft_head` means: a path, or the name of a head that is shipped.

    Raises:
      InputError: no such folder, or no head of that name comes with jspec.
    """
    if not head.startswith(_PREFIX):
        folder = pathlib.Path(head).expanduser()
        if not folder.is_dir():
            raise InputError(f"{head}: no such folder; expected one with a trained head")
        return folder
    if head.removeprefix(_PREFIX) not in _HEADS.values():
        known = ", ".join(_PREFIX + name for name in _HEADS.values())
        raise InputError(f"expected a head that comes with jspec, {known}; got {head!r}")
    return _FOLDER / head.removeprefix(_PREFIX)

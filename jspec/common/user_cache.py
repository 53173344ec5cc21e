"""The user's cache folder, where downloads are kept."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

from jspec.common.errors import InputError


def cache_dir() -> pathlib.Path:
    """Returns `$JSPEC_CACHE`, or `jspec` in `$XDG_CACHE_HOME`, or in `~/.cache`. May not exist.

    Raises:
      InputError: nobody knows of a home folder.
    """
    if own := os.environ.get("JSPEC_CACHE"):
        return pathlib.Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    if shared:
        return pathlib.Path(shared) / "jspec"
    try:
        return pathlib.Path.home() / ".cache" / "jspec"
    except RuntimeError:
        raise InputError(
            "no home folder is known: expected $JSPEC_CACHE or $HOME to be set"
        ) from None


@contextlib.contextmanager
def exclusive(path: pathlib.Path) -> Iterator[None]:
    """Holds the lock file at `path` against other processes, waiting for them.

    Where the system has no `flock` nothing is held: files are put in place by renaming, so that
    two processes at once cost a download and break nothing.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

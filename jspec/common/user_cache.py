"""The user's cache folder, where downloads and compiled programs are kept."""

import contextlib
import os
import pathlib

from jspec.common.errors import InputError


def cache_dir() -> pathlib.Path:
    """Returns `$JSPEC_CACHE`, or `jspec` in `$XDG_CACHE_HOME` or in the system's cache folder.

    Raises:
      InputError: there is no home folder.
    """
    import platformdirs

    if own := os.environ.get("JSPEC_CACHE"):
        return pathlib.Path(own).expanduser()
    with contextlib.suppress(RuntimeError):  # which newer versions raise; older ones keep the ~
        folder = platformdirs.user_cache_path("jspec", appauthor=False)
        if folder.is_absolute():
            return folder
    raise InputError("no home folder is known: expected $JSPEC_CACHE or $HOME to be set")

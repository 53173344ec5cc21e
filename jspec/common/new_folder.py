"""Folders that appear only when they are complete."""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator

from jspec.common.errors import InputError


def check_new(path: pathlib.Path) -> None:
    """Raises an `InputError` if `path` exists and is not an empty folder."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise InputError(f"{path} exists: it is not overwritten")


@contextlib.contextmanager
def new_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary folder next to `path`, which is renamed to it at the end or removed.

    Raises:
      InputError: `path` exists and is not an empty folder, or cannot be written.
    """
    path = path.absolute()
    check_new(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{path.name}.", dir=path.parent, ignore_cleanup_errors=True
        ) as name:
            partial = pathlib.Path(name)
            yield partial
            partial.chmod(0o755)  # tempfile lets only the owner in
            os.replace(partial, path)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from None

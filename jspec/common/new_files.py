"""Files and folders that appear only when they are complete."""

import contextlib
import os
import pathlib
import tempfile
import threading
from collections.abc import Iterator

from jspec.common.errors import InputError


@contextlib.contextmanager
def new_file(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary path next to `path`, which replaces it at the end or is removed.

    A reader finds either file whole, the old or the new, even if the program is killed.

    Raises:
      OSError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        yield partial
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):  # its folder may be none
            partial.unlink(missing_ok=True)


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

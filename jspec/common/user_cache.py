"""The user's cache folder, and XLA's persistent compilation cache in it."""

import contextlib
import functools
import logging
import os
import pathlib
from typing import Any

import jax
from jax._src import compilation_cache  # JAX has no public hook for a damaged entry

from jspec.common.errors import InputError


def cache_dir() -> pathlib.Path:
    """Returns `$JSPEC_CACHE`, or `jspec` in `$XDG_CACHE_HOME` or in the home's cache folder."""
    import platformdirs

    if own := os.environ.get("JSPEC_CACHE"):
        return pathlib.Path(own).expanduser()
    with contextlib.suppress(RuntimeError):  # which newer versions raise; older ones keep the ~
        folder = platformdirs.user_cache_path("jspec", appauthor=False)
        if folder.is_absolute():
            return folder
    raise InputError("no home folder is known: expected $JSPEC_CACHE or $HOME to be set")


def use_compile_cache() -> None:
    """Keeps compiled programs for a second start, unless JAX was given another folder for them."""
    if jax.config.values["jax_compilation_cache_dir"]:
        return
    jax.config.update("jax_compilation_cache_dir", str(_folder()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    _rebuild_damaged_entries()


def _folder() -> pathlib.Path:
    return cache_dir() / "xla"


def _rebuild_damaged_entries() -> None:
    """From now on removes an entry that cannot be read, so that it is written again.

    JAX does not write entries atomically: a killed process leaves part of one. JAX alone would
    then warn and compile at every start, and never write the entry, because a file is there. With a
    version of JAX that lacks the function wrapped here, it still does.
    """
    read = getattr(compilation_cache, "get_executable_and_time", None)
    if read is None or hasattr(read, "__wrapped__"):
        return

    @functools.wraps(read)
    def read_or_remove(cache_key: str, *args: Any, **kwargs: Any) -> tuple[Any, int | None]:
        try:
            return read(cache_key, *args, **kwargs)
        except OSError:  # of a folder that is not ours to read: nothing is damaged
            raise
        except Exception:  # of zlib, zstd or XLA, depending on the damage
            if jax.config.values["jax_compilation_cache_dir"] != str(_folder()):
                raise  # not jspec's own folder
            with contextlib.suppress(OSError):
                (_folder() / f"{cache_key}-cache").unlink()
            _warn_once()
            return None, None  # what JAX returns for a missing entry

    compilation_cache.get_executable_and_time = read_or_remove


@functools.cache
def _warn_once() -> None:
    message = "jspec: the cache of compiled programs is damaged; what is missing is compiled again"
    logging.getLogger("jspec").warning(message)

"""XLA's persistent compilation cache, on by default: a second start need not compile."""

import contextlib
import functools
import logging
import pathlib
from typing import Any

import jax
from jax._src import compilation_cache  # JAX has no public way to hear of a damaged entry

from jspec.common.user_cache import cache_dir


def use_compile_cache() -> None:
    """Keeps compiled programs in the user's cache folder, unless JAX is told of another one."""
    if jax.config.values["jax_compilation_cache_dir"]:
        return
    jax.config.update("jax_compilation_cache_dir", str(_folder()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    _rebuild_damaged_entries()


def _folder() -> pathlib.Path:
    return cache_dir() / "xla"


def _rebuild_damaged_entries() -> None:
    """From now on removes an entry that cannot be read, so that it is written anew.

    JAX writes an entry in one go, but not atomically: a process that is killed leaves part of it.
    By itself JAX would warn of it at every start, compile, and write nothing, as a file is there.
    A JAX without the function that is wrapped here goes on doing so.
    """
    read = getattr(compilation_cache, "get_executable_and_time", None)
    if read is None or hasattr(read, "__wrapped__"):
        return

    @functools.wraps(read)
    def read_or_remove(cache_key: str, *args: Any, **kwargs: Any) -> tuple[Any, int | None]:
        try:
            return read(cache_key, *args, **kwargs)
        except Exception:  # of zlib, zstd or XLA, whatever the damage leads to
            if jax.config.values["jax_compilation_cache_dir"] != str(_folder()):
                raise  # not jspec's own folder
            with contextlib.suppress(OSError):
                (_folder() / f"{cache_key}-cache").unlink()
            _warn_once()
            return None, None  # as for a program that is not there

    compilation_cache.get_executable_and_time = read_or_remove


@functools.cache
def _warn_once() -> None:
    message = "jspec: the cache of compiled programs is damaged; what is missing is compiled again"
    logging.getLogger("jspec").warning(message)

"""The user's cache folder: XLA's compiled programs, and what was measured once, in JSON.

Also whether the network may be used, to put models there: nothing else is ever fetched.
"""

import contextlib
import fcntl
import functools
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import compilation_cache  # JAX has no public hook for a damaged entry

from jspec.common.errors import InputError, say
from jspec.common.json_lines import read_json, save_json
from jspec.common.new_files import new_file

_OFFLINE = "JSPEC_OFFLINE"
compile_listeners: list[Callable[[str], object]] = []
"""Called with a program's key, which begins with `jit_NAME`, before it is compiled: it is not in
the cache."""


def cache_dir() -> pathlib.Path:
    """Returns `$JSPEC_CACHE`, or `jspec` in `$XDG_CACHE_HOME` or in the home's cache folder."""
    if folder_name := os.environ.get("JSPEC_CACHE"):
        return pathlib.Path(folder_name).expanduser()
    import platformdirs  # which a machine that runs scripts.gpu_session may not have

    with contextlib.suppress(RuntimeError):  # which newer versions raise; older ones keep the ~
        folder = platformdirs.user_cache_path("jspec", appauthor=False)
        if folder.is_absolute():
            return folder
    raise InputError("no home folder is known: expected $JSPEC_CACHE or $HOME to be set")


def use_compile_cache() -> None:
    """Keeps compiled programs for a second start, unless JAX was given another folder for them."""
    _rebuild_damaged_entries()
    _survive_a_full_disk()
    if jax.config.values["jax_compilation_cache_dir"]:
        return
    jax.config.update("jax_compilation_cache_dir", str(_folder()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _folder() -> pathlib.Path:
    return cache_dir() / "xla"


def _is_own_folder() -> bool:
    return jax.config.values["jax_compilation_cache_dir"] == str(_folder())


def _rebuild_damaged_entries() -> None:
    """From now on removes an entry that cannot be read, so that it is written again.

    JAX does not write entries atomically: a killed process leaves a partial entry. JAX alone would
    then warn and compile at every start, and never write the entry, because a file is there. With a
    version of JAX that lacks the function wrapped here, it still does.
    """

    def read_or_remove(read: Any, cache_key: str, *args: Any, **kwargs: Any) -> Any:
        entry = None, None  # what JAX returns for a missing entry
        try:
            entry = read(cache_key, *args, **kwargs)
        except Exception as error:  # of zlib, zstd or XLA, depending on the damage
            if not _is_own_folder():
                raise
            if isinstance(error, OSError):  # of the system: nothing is damaged
                _warn_once(f"cannot be used: {_folder()}: {error.strerror}")
            else:
                with contextlib.suppress(OSError):
                    _entry(cache_key).unlink()
                _warn_once("is damaged; what is missing is compiled again")
        if entry[0] is None:
            for listener in tuple(compile_listeners):
                listener(cache_key)
        return entry

    _replace("get_executable_and_time", read_or_remove)


def _survive_a_full_disk() -> None:
    """From now on says in one line that programs cannot be kept; JAX would say so each time."""

    def write_or_remove(write: Any, cache_key: str, *args: Any, **kwargs: Any) -> None:
        try:
            write(cache_key, *args, **kwargs)
        except OSError as error:
            if not _is_own_folder():
                raise
            with contextlib.suppress(OSError):
                _entry(cache_key).unlink()  # a part of it would be damaged at the next start
            _warn_once(f"cannot be written: {_folder()}: {error.strerror}")

    _replace("put_executable_and_time", write_or_remove)


def _replace(name: str, around: Callable[..., Any]) -> None:
    """Has a function of JAX's called by another one, unless it is already."""
    function = getattr(compilation_cache, name, None)
    if function is not None and not hasattr(function, "__wrapped__"):
        replacement = functools.update_wrapper(functools.partial(around, function), function)
        setattr(compilation_cache, name, replacement)


def _entry(cache_key: str) -> pathlib.Path:
    return _folder() / f"{cache_key}-cache"


@functools.cache
def _warn_once(what: str) -> None:
    say(f"jspec: the cache of compiled programs {what}")


def read_kept(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a file; an empty one where it is missing or, with a note, damaged."""
    try:
        return read_json(path)
    except InputError as error:
        say(f"note: {error}: begun anew")
        return {}


def keep(path: pathlib.Path, entries: dict[str, Any], what: str) -> bool:
    """Replaces the file in one step, so that nobody reads half of it.

    Where it cannot be written, a note says that `what` is not kept, and the result is False.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as partial:
            save_json(partial, entries)
        return True
    except OSError as error:
        say(f"note: cannot keep {what} in {path}: {error.strerror}")
        return False


@contextlib.contextmanager
def only_one(path: pathlib.Path, what: str) -> Iterator[None]:
    """Lets one process at a time pass, by a lock on a file; the others wait, and say so.

    `what` says what another process does, for example "fetches NAME". The lock ends with it.

    Raises:
      OSError: the file cannot be written, or its file system has no locks.
    """
    with path.open("w") as lock:  # closing the file gives the lock back
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"jspec: waiting for another process that {what}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def forbid_network() -> None:
    """Forbids the network to this process and to those that it starts, as --offline does."""
    os.environ[_OFFLINE] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"  # which other libraries read, too


def is_offline() -> bool:
    """Returns whether the network is forbidden.

    Raises:
      InputError: the variable has another value than 0 or 1.
    """
    value = os.environ.get(_OFFLINE, "")
    if value not in ("", "0", "1"):
        raise InputError(f"expected {_OFFLINE} as 0 or 1, got {value!r}")
    return value == "1"

"""XLA's persistent compilation cache, on by default: a second start need not compile.

JAX names an entry after the program, the compiler's version and the machine: those of another
version are not found, and in time they make room.
"""

import importlib.util

import jax

from jspec.user_cache import cache_dir

_MAX_BYTES = 2 << 30  # some hundred sets of programs


def use_compile_cache() -> None:
    """Keeps compiled programs in the user's cache folder, unless JAX is told of another one."""
    if jax.config.values["jax_compilation_cache_dir"]:
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if importlib.util.find_spec("filelock"):  # which JAX needs for a limit
        jax.config.update("jax_compilation_cache_max_size", _MAX_BYTES)

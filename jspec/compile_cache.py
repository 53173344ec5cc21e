"""XLA's persistent compilation cache, on by default: a second start need not compile."""

import jax

from jspec.user_cache import cache_dir


def use_compile_cache() -> None:
    """Keeps compiled programs in the user's cache folder, unless JAX is told of another one."""
    if jax.config.values["jax_compilation_cache_dir"]:
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

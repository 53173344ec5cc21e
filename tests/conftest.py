"""What every test gets: checked shapes and types, strict dtype promotion, fresh keys, a cache."""

import gc
import itertools
import pathlib

import jax
import jaxtyping
import pytest

import tests.typecheck  # noqa: F401  (jaxtyping looks it up by name)

_MAX_MAPS = 25_000

# Before jspec is imported anywhere, so that the shapes in its annotations are checked at run time.
jaxtyping.install_import_hook(
    ["jspec.models", "jspec.sampling", "jspec.speculation", "jspec.drafters"],
    "tests.typecheck.check_function",
)
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="session", autouse=True)
def compile_cache(request, tmp_path_factory):
    """Compiles a program once for all workers and runs, and leaves the user's own cache alone.

    Without pytest's cache (`-p no:cacheprovider`) a program is compiled once a run.
    """
    cache = getattr(request.config, "cache", None)
    folder = tmp_path_factory.mktemp("xla") if cache is None else cache.mkdir("xla")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return folder


@pytest.fixture(scope="module", autouse=True)
def few_memory_maps():
    """Forgets compiled programs before they are too many.

    Each one takes a few dozen memory maps, of which Linux grants a process 65,530: a worker that
    has compiled for some hundred tests crashes.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MAX_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def new_key():
    """Returns a function that gives a different key at every call, the same ones in every run."""
    counter = itertools.count()
    return lambda: jax.random.key(next(counter))


@pytest.fixture(scope="session")
def tiny_pair():
    """Returns a tiny target and draft that have opinions."""
    from tests.tiny import make_tiny_pair

    return make_tiny_pair()

"""What every test gets: checked shapes and types, strict dtype promotion, fresh keys, a cache.

Without beartype, as on a GPU machine where little but JAX is installed, shapes and types go
unchecked, and the head of the report says so. JSPEC_TEST_OPTIMISED=1 compiles everything as users
get it.
"""

import ctypes
import gc
import importlib.util
import itertools
import os
import pathlib
import sys

import jax
import jaxtyping
import pytest

_HAS_BEARTYPE = importlib.util.find_spec("beartype") is not None
_OPTIMISED = os.environ.get("JSPEC_TEST_OPTIMISED") == "1"
_MAX_BYTES = 2_700_000_000  # resident, above which a process forgets its compiled programs

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is asked of a hub, nor waited for

# Before jspec is imported anywhere, so that the shapes in its annotations are checked at run time.
if _HAS_BEARTYPE:
    import tests.typecheck

    jaxtyping.jaxtyped = tests.typecheck.decorate_once  # by this name in what the hook compiles
    jaxtyping.install_import_hook(
        [
            "jspec.kernels",
            "jspec.models",
            "jspec.sampling.distribution",
            "jspec.sampling.settings",
            "jspec.speculation",
            "jspec.drafters",
        ],
        "tests.typecheck.check_function",
    )
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Tracing makes many objects, few of them garbage: looking for it took a sixteenth of the time.
gc.set_threshold(50_000, 20, 20)
# Compiling is most of the time of the tests: this spares much of it; see also `optimised`. What the
# tests start inherits it. XLA ends a process at a flag that it does not know.
jax.config.update("jax_disable_most_optimizations", not _OPTIMISED)
if not _OPTIMISED:
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    # No lines of Python in the programs, which none of the quick tests reads: a tenth of the time.
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
    jax.config.update("jax_traceback_in_locations_limit", 0)
if jax.__version_info__[:2] == (0, 10) and not _OPTIMISED:
    _FLAGS = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = (
        f"--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 {_FLAGS}"
    )


def pytest_configure(config):
    """Leaves the device alone where programs are only compiled for another.

    The extra compile-gpu has a compiler, but not all of CUDA's libraries: JAX could not start it.
    """
    if config.option.markexpr in ("compile_gpu", "compile_tpu"):
        os.environ["JAX_PLATFORMS"] = "cpu"  # of what the tests start, too
        jax.config.update("jax_platforms", "cpu")


def pytest_report_header():
    """Says what is not as in CI."""
    unchecked = [] if _HAS_BEARTYPE else ["beartype is not installed: types go unchecked"]
    return unchecked + (["compiled as users get it"] if _OPTIMISED else [])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Gives each worker its share of the tests in order, and then what another has left.

    Neighbours share programs: dealt out by turns, all workers would compile them.
    """
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getvalue("dist") == "load" else None


@pytest.fixture
def lines_of_code(monkeypatch):
    """Has the lines of Python in the programs, for tests that read them."""
    monkeypatch.delenv("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", raising=False)
    changes = {
        "jax_traceback_in_locations_limit": 10,
        "jax_compilation_cache_include_metadata_in_key": True,  # not those of other tests
    }
    before = {name: getattr(jax.config, name) for name in changes}
    for name, value in changes.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="session", autouse=True)
def compile_cache(request, tmp_path_factory):
    """Compiles a program once for all workers and runs, and leaves the user's own cache alone.

    Without pytest's cache (`-p no:cacheprovider`) a program is compiled once a run.
    """
    cache = getattr(request.config, "cache", None)
    folder = tmp_path_factory.mktemp("xla") if cache is None else cache.mkdir("xla")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return folder


@pytest.fixture(autouse=True)
def few_programs():
    """Forgets compiled programs when the process has grown large, and gives their memory back.

    A program takes a few megabytes: a worker that kept those of some hundred tests would take more
    than two of them may on a machine of CI. What is needed again comes from the compile cache.
    """
    yield
    if _resident_bytes() > _MAX_BYTES:
        _forget_programs()


def _resident_bytes():
    """Returns the memory that the process takes; 0 where the system does not say."""
    statm = pathlib.Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


@pytest.fixture(scope="module")
def optimised():
    """Compiles with LLVM's optimisations, as users do; what is compiled already is forgotten.

    XLA's own way with loops stays simpler: it is the process's. Programs wholly as users
    get them are those that test_program.py audits, and one of test_generate_cli.py.
    """
    _forget_programs()
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", not _OPTIMISED)
    _forget_programs()


def _forget_programs():
    jax.clear_caches()
    gc.collect()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


@pytest.fixture
def new_key():
    """Returns a function that gives a different key at every call, the same ones in every run."""
    counter = itertools.count()
    return lambda: jax.random.key(next(counter))


@pytest.fixture
def library():
    """Fails where a compiler is there and the C++ is not; skips only where there is none."""
    from jspec.kernels import library as native

    if native._cpp_compiler() is None or os.environ.get("JSPEC_NATIVE") == "0":
        pytest.skip("no C++ compiler, or switched off")
    assert native.is_available()


@pytest.fixture(scope="session")
def tiny_pair():
    """Returns a tiny target and draft that have opinions."""
    from tests.tiny import make_tiny_pair

    return make_tiny_pair()

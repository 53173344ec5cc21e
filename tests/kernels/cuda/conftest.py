"""The CUDA C++ kernels, compiled by g++ to run in the emulator (`emulation.h`), on a CPU."""

import contextlib
import functools
import os
import pathlib
import shutil

import jax
import pytest

from jspec.common.user_cache import only_one
from jspec.kernels import library

FOLDER = pathlib.Path(__file__).parent
CUDA = FOLDER.parents[2] / "jspec" / "kernels" / "cuda"
# The order of sums is that of the source. What is not aligned ends the process with a message, as a
# GPU would.
_OPTIONS = (
    "-std=c++17", "-Og", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-w",
    "-fsanitize=alignment", "-fno-sanitize-recover=all", f"-I{CUDA}", f"-I{FOLDER}",
)  # fmt: skip


@pytest.fixture(scope="session")
def emulator(request, tmp_path_factory):
    """Returns the library of emulated kernels, whose handlers XLA then calls on a CPU."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    recipe = library.Recipe(
        name="emulated",
        language="C++",
        compiler=compiler,
        variable="PATH",
        sources=sorted(FOLDER.glob("*.cc")),
        headers=[*sorted(FOLDER.glob("*.h")), *sorted(CUDA.glob("*.cu*"))],
        options=_OPTIONS,
    )
    cache = getattr(request.config, "cache", None)
    folder = tmp_path_factory.mktemp("cuda") if cache is None else cache.mkdir("cuda")
    # Of several workers one compiles, on all cores.
    with pytest.MonkeyPatch.context() as patch, only_one(folder / "lock", "compiles"):
        patch.setenv("JSPEC_CACHE", str(folder))
        emulated = library.load_library(recipe)
    for name in library.cuda_handlers():
        handler = jax.ffi.pycapsule(getattr(emulated, f"emulated_{name}"))
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    return emulated


@contextlib.contextmanager
def _set_within(change, usual, value):
    """Within it a setting of the emulator has a value; kernels that were started are waited for."""
    jax.block_until_ready(jax.live_arrays())
    change(value)
    try:
        yield
    finally:
        try:
            jax.block_until_ready(jax.live_arrays())
        finally:
            change(usual)


@pytest.fixture
def in_order(emulator):
    """Returns a context in which fibers run in an order: 0, from the last (1), or by a seed."""

    return functools.partial(_set_within, emulator.jspec_set_order, 0)


@pytest.fixture
def on_processors(emulator):
    """Returns a context in which the emulated GPU has a number of multiprocessors; usually two."""

    return functools.partial(_set_within, emulator.jspec_set_processors, 2)


@pytest.fixture
def nvcc():
    compiler = library.find_nvcc()
    if compiler is None or not os.path.exists(compiler):
        pytest.skip("no nvcc")
    return compiler

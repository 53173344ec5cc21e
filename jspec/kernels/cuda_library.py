"""The CUDA C++ library: compiled on first use, loaded once, and called as a part of XLA's programs.

The sources in `cuda/` are compiled for the GPU that is here by the `nvcc` that JAX's packages for
GPUs bring, or by the user's own. They are called through XLA's foreign function interface, and
can be parts of a CUDA graph. Where they cannot be compiled, XLA computes everything.
"""

import ctypes
import functools
import importlib.util
import os
import pathlib
import re
import shlex
import shutil
import sys
import threading

import jax

from jspec.kernels.backend import backend, is_foreign
from jspec.kernels.build import Recipe, load_library

_SOURCES = pathlib.Path(__file__).parent / "cuda"
_FOREIGN_ARCHITECTURE = "sm_90a"  # of programs that are only compiled
_OLDEST = (8, 0)  # the first compute capability whose tensor cores multiply bfloat16
# Without host warnings, which are of XLA's headers.
_OPTIONS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC,-w", "-cudart", "static")
_LOCK = threading.Lock()  # so that the library is built and loaded once


def is_available() -> bool:
    """Returns whether the kernels can be called on this device; builds the library if need be.

    A build that fails is reported by one line. `JSPEC_NATIVE=0` in the environment leaves
    everything to XLA. For a GPU that is not here the library is built, so that XLA can compile
    programs that call it.
    """
    if backend() != "gpu" or os.environ.get("JSPEC_NATIVE") == "0":
        return False
    with _LOCK:
        return _prepare(None if is_foreign() else _capability()) is not None


def architecture_of(capability: str) -> str:
    """Returns nvcc's name for a GPU's compute capability, as JAX tells it: "9.0" is "sm_90a".

    Raises:
      OSError: the kernels cannot be compiled for it; the text says why.
    """
    if not re.fullmatch(r"\d+\.\d", capability):
        raise OSError(f"expected a GPU by NVIDIA, got compute capability {capability or 'none'}")
    major, minor = map(int, capability.split("."))
    if (major, minor) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise OSError(f"expected compute capability {oldest} or newer, got {capability}")
    # What only this architecture has is in a name of its own.
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def find_nvcc() -> str | None:
    """Returns the compiler of `$CUDA_HOME`, of JAX's packages, or on the PATH; None without one."""
    if home := os.environ.get("CUDA_HOME"):
        return str(pathlib.Path(home) / "bin" / "nvcc")
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        for nvcc in sorted(pathlib.Path(folder).glob("cu*/bin/nvcc"), reverse=True):
            home = nvcc.parents[1]
            # A part of the packages compiles nothing.
            if (home / "include/cuda_runtime.h").exists() and (home / "nvvm/bin/cicc").exists():
                return str(nvcc)
    return shutil.which("nvcc")


def recipe(architecture: str) -> Recipe:
    """Returns how the library is made for an architecture, as "sm_90a"."""
    # The packages' static libraries lie where nvcc does not look.
    nvcc = find_nvcc()
    folder = pathlib.Path(nvcc).parent.parent / "lib" if nvcc else None
    links = (f"-L{folder}",) if folder and (folder / "libcudart_static.a").exists() else ()
    return Recipe(
        name=f"jspec-{architecture}",
        language="CUDA C++",
        compiler=nvcc and shlex.quote(nvcc),
        variable="CUDA_HOME",
        sources=sorted(_SOURCES.glob("*.cu")),
        headers=sorted(_SOURCES.glob("*.cuh")),
        options=(*_OPTIONS, f"-arch={architecture}"),
        link_options=links,
    )


def handler_names() -> list[str]:
    """Returns the names of the library's handlers, which its sources define."""
    define = re.compile(r"XLA_FFI_DEFINE_HANDLER_SYMBOL\(\s*(\w+)")
    texts = (path.read_text() for path in sorted(_SOURCES.glob("*.cu")))
    return [name for text in texts for name in define.findall(text)]


def _capability() -> str:
    """Returns the compute capability of the default device; the text of what is no number, too."""
    return str(getattr(jax.devices()[0], "compute_capability", ""))


@functools.cache
def _prepare(capability: str | None) -> ctypes.CDLL | None:
    """Returns the library for a compute capability; for none, that for programs to be compiled."""
    try:
        here = capability is not None
        library = load_library(
            recipe(architecture_of(capability) if here else _FOREIGN_ARCHITECTURE)
        )
        library.jspec_cuda_problem.restype = ctypes.c_char_p
        if here and (problem := library.jspec_cuda_problem()):
            raise OSError(f"the CUDA C++ kernels do not load: {problem.decode()}")
        for name in handler_names():
            handler = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(name, handler, platform="CUDA")
    # ValueError: no home folder, or quotes in $CUDA_HOME; RuntimeError: JAX has another library's.
    except (OSError, ValueError, RuntimeError) as error:
        slow = "XLA computes everything, and decoding takes longer"
        print(f"jspec: {error}; {slow}", file=sys.stderr, flush=True)
        return None
    return library

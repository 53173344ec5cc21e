"""The libraries in C++ and CUDA C++: compiled on first use, loaded once, called by XLA's programs.

XLA on CPU leaves much of the machine unused where decoding spends its time. It reads the weights of
a bfloat16 product at half the speed of memory, and at a tenth of it for one row. Its attention
reads the whole buffer of a cache. And a row's result may depend on the rows beside it. The C++
sources in `cpp/` do better. The CUDA C++ sources in `cuda/` compute blocks of few tokens on a GPU;
they are compiled by the `nvcc` that JAX's packages for GPUs bring, or by the user's `nvcc`, and can
be parts of a CUDA graph. Both are called through XLA's foreign function interface. Where sources
cannot be compiled, XLA computes everything, and one line says so. `JSPEC_NATIVE=0` in the
environment leaves everything to XLA, too.
"""

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jspec.common.errors import say
from jspec.common.user_cache import cache_dir
from jspec.kernels.backend import backend, is_foreign, may_be_native

_LOCK = threading.Lock()  # so that a library is built and loaded once
_CPP = pathlib.Path(__file__).parent / "cpp"
_PACKED_PRODUCT = "packed_product.cc"  # compiled for each format by itself
# -ffp-contract=off: the compiler must not fuse a multiplication and an addition in one loop and not
# in another, or results would depend on the number of rows. -fno-strict-aliasing: vectors are read
# where numbers of other types were written. -falign-loops: without it a change elsewhere moved the
# products' inner loop, and a plain step of bfloat16 took 5 to 13 % longer (AMD EPYC, AVX2).
_CPP_OPTIONS = (
    "-std=gnu++17", "-O3", "-march=native", "-falign-loops=64", "-ffp-contract=off",
    "-fno-strict-aliasing", "-fPIC", "-pthread", "-w",
)  # fmt: skip
_CPP_COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 240  # of a compilation at most
_COMPILERS = concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1)  # ahead of their use
_FUNCTIONS = (
    "product", "int8_product", "int4_product", "attention", "rms_norm", "rotate_heads", "swiglu",
    "smallest_rank", "first_argmax", "table_rows", "packed_rows", "write_rows", "grouped_product",
    "attend_pages", "write_pages", "unwritten",
)  # fmt: skip
_IN_PLACE = {"write_rows": {0: 0}, "write_pages": {0: 0}}  # operands that are changed and returned

_CUDA = pathlib.Path(__file__).parent / "cuda"
# Without host warnings, which are of XLA's headers.
_CUDA_OPTIONS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC,-w", "-cudart", "static")
_FOREIGN_ARCHITECTURE = "sm_90a"  # of programs that are only compiled
_OLDEST = (8, 0)  # the first compute capability whose tensor cores multiply bfloat16


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a library is made of.

    Attributes:
      name: of the library's file, before its fingerprint.
      language: that the compiler compiles, as a reader of its errors calls it.
      compiler: a command, which may have options; None without any.
      variable: the environment's, which names a compiler.
      sources: files, each of which is compiled by itself.
      headers: files that they include.
      options: of the compiler.
      link_options: besides, where the library is linked.
      machine: what else decides the library: the processor.
    """

    name: str
    language: str
    compiler: str | None
    variable: str
    sources: Sequence[pathlib.Path]
    headers: Sequence[pathlib.Path]
    options: Sequence[str]
    link_options: Sequence[str] = ()
    machine: str = ""

    def fingerprint(self) -> str:
        """Returns a hash of all that decides the library: sources, options, headers, processor."""
        texts = [path.read_text() for path in sorted([*self.sources, *self.headers])]
        command = self.compiler, *self.options, *self.link_options, self.machine
        parts = *texts, importlib.metadata.version("jaxlib"), *command
        return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]

    def path(self) -> pathlib.Path:
        """Returns where the library lies in the user's cache."""
        return cache_dir() / "native" / f"{self.name}-{self.fingerprint()}.so"


def load_library(recipe: Recipe) -> ctypes.CDLL:
    """Returns a library, from the user's cache if it is there, else compiled.

    Raises:
      OSError: the library cannot be built or loaded; the text says why.
    """
    path = recipe.path()
    with contextlib.suppress(OSError):
        # To load a damaged library crashes the process.
        if path.with_suffix(".sha256").read_text() == _digest(path):
            return ctypes.CDLL(str(path))
    return _build(recipe, path)


def _digest(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _build(recipe: Recipe, path: pathlib.Path) -> ctypes.CDLL:
    """Compiles in a folder beside the path, and renames the result: no one sees a part of it."""
    if recipe.compiler is None:
        raise OSError(f"no {recipe.language} compiler was found")
    path.parent.mkdir(parents=True, exist_ok=True)
    run = functools.partial(_run, recipe)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = pathlib.Path(folder) / path.name
        goals = {source: built.with_name(f"{source.stem}.o") for source in recipe.sources}
        include = f"-I{jax.ffi.include_dir()}"
        commands = [[include, "-c", str(source), "-o", str(goals[source])] for source in goals]
        # No more compilers at once than cores: each takes several hundred megabytes.
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(run, commands))
        objects = map(str, goals.values())
        run(["-shared", *objects, *recipe.link_options, "-o", str(built)])
        library, digest = ctypes.CDLL(str(built)), built.with_suffix(".sha256")
        digest.write_text(_digest(built))
        built.replace(path)
        digest.replace(path.with_suffix(".sha256"))  # last: without it the library is built again
    return library


def _run(recipe: Recipe, arguments: Sequence[str]) -> None:
    compiler = recipe.compiler or ""
    command = [*shlex.split(compiler), *recipe.options, *arguments]
    options = {"capture_output": True, "text": True, "errors": "replace", "check": True}
    try:
        subprocess.run(command, timeout=_SECONDS, **options)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"status {error.returncode}"]
        said = next((line for line in lines if "error" in line), lines[0])
        raise OSError(f"{compiler} failed: {said}") from None
    except FileNotFoundError:
        name = f"{recipe.language} compiler {compiler}"
        raise OSError(f"there is no {name} (${recipe.variable})") from None
    except subprocess.TimeoutExpired:
        raise OSError(f"{compiler} took more than {_SECONDS} s") from None


def cpp_recipe() -> Recipe:
    """Returns how the C++ is made for this processor."""
    return Recipe(
        name="jspec",
        language="C++",
        compiler=_cpp_compiler(),
        variable="CXX",
        sources=[path for path in sorted(_CPP.glob("*.cc")) if path.name != _PACKED_PRODUCT],
        # Its fingerprint stands for all sources in C++.
        headers=[*sorted(_CPP.glob("*.h")), *_CPP.glob(_PACKED_PRODUCT)],
        options=_CPP_OPTIONS,
        machine=_processor(),
    )


def packed_recipe(kind: str) -> Recipe:
    """Returns how the products with kernels of a format are made; see `packed.FORMATS`."""
    recipe, source = cpp_recipe(), _CPP / _PACKED_PRODUCT
    # GCC would put off additions until all products are there: more than the registers hold.
    options = *recipe.options, "-fno-tree-ter", f"-DJSPEC_KIND={kind}"
    return dataclasses.replace(recipe, name=f"jspec-{kind}", sources=[source], options=options)


def _cpp_compiler() -> str | None:
    return os.environ.get("CXX") or next(filter(None, map(shutil.which, _CPP_COMPILERS)), None)


def _processor() -> str:
    """Returns the processor's features: different machines may share one home folder."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = [line for line in lines if line.startswith(("flags", "Features"))]
    return "".join([platform.system(), platform.machine(), platform.processor(), *features[:1]])


def is_available() -> bool:
    """Returns whether C++ computes on this device; builds the library first if need be."""
    return _cpp_library() is not None


def has_pairs() -> bool:
    """Returns whether the processor multiplies pairs of bfloat16 numbers (AVX-512 BF16)."""
    library = _cpp_library()
    return library is not None and library.jspec_has_pairs()


def has_tiles() -> bool:
    """Returns whether more rows of a bfloat16 product make each of them cheaper (AMX)."""
    library = _cpp_library()
    return library is not None and library.jspec_has_tiles()


def has_packed() -> bool:
    """Returns whether packed kernels are multiplied in C++ (AVX2 or AVX-512)."""
    library = _cpp_library()
    return library is not None and library.jspec_has_packed()


def begin_packed(kind: str) -> None:
    """Begins to build the products with kernels of a format, if they are in C++ here."""
    if has_packed():
        with _LOCK:
            _begun_packed(kind)


def is_packed_available(kind: str) -> bool:
    """Returns whether C++ multiplies kernels of a format; builds its library first if need be."""
    if not has_packed():
        return False
    with _LOCK:
        return _prepare_packed(kind) is not None


def host_function(name: str) -> Callable[..., None] | None:
    """Returns a function of the library that the host calls, on pointers; None without it."""
    library = _cpp_library()
    return None if library is None else getattr(library, f"jspec_{name}")


def _cpp_library() -> ctypes.CDLL | None:
    # Not under the cache of `_prepare_cpp`: a program for another device says nothing of this
    # device.
    if backend() != "cpu" or not may_be_native():
        return None
    with _LOCK:
        return _prepare_cpp()


@functools.cache
def _prepare_cpp() -> ctypes.CDLL | None:
    def load() -> tuple[ctypes.CDLL, Iterable[str]]:
        library = load_library(cpp_recipe())
        for has in (library.jspec_has_pairs, library.jspec_has_tiles, library.jspec_has_packed):
            has.restype = ctypes.c_bool
        library.jspec_team.restype = ctypes.c_void_p
        return library, [f"jspec_{function}" for function in _FUNCTIONS]

    return _prepare(load, "cpu", "kernels in C++: XLA computes everything")


@functools.cache
def _begun_packed(kind: str) -> concurrent.futures.Future[ctypes.CDLL]:
    return _COMPILERS.submit(load_library, packed_recipe(kind))


@functools.cache
def _prepare_packed(kind: str) -> ctypes.CDLL | None:
    names = [f"jspec_{kind}_{name}" for name in ("product", "byte_product")]

    def load() -> tuple[ctypes.CDLL, Iterable[str]]:
        library, main = _begun_packed(kind).result(), _prepare_cpp()
        assert main is not None
        library.jspec_take_team(ctypes.c_void_p(main.jspec_team()))
        return library, names

    return _prepare(load, "cpu", f"products of {kind} in C++: XLA computes these")


def _prepare(
    load: Callable[[], tuple[ctypes.CDLL, Iterable[str]]], device: str, missing: str
) -> ctypes.CDLL | None:
    """Returns a library, whose handlers of the given names XLA then knows; None if it fails.

    A line then says what is missing.
    """
    try:
        library, names = load()
        for name in names:
            handler = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(name, handler, platform=device)
    # ValueError: no home folder, or quotes in $CXX; RuntimeError: JAX has another library's.
    except (OSError, ValueError, RuntimeError) as error:
        say(f"jspec: no {missing}, and decoding takes longer ({error})")
        return None
    return library


def is_cuda_available() -> bool:
    """Returns whether CUDA C++ can be called on this device; builds the library if need be.

    For a GPU that is not here the library is built, so that XLA can compile programs that call it.
    """
    if backend() != "gpu" or not may_be_native():
        return False
    # The text of what is no number, too.
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    with _LOCK:
        return _prepare_cuda(None if is_foreign() else capability) is not None


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
    # What only this architecture has has its own name.
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def find_nvcc() -> str | None:
    """Returns the compiler of `$CUDA_HOME`, of JAX's packages, or on the PATH; None without any."""
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


def cuda_recipe(architecture: str) -> Recipe:
    """Returns how the CUDA C++ is made for an architecture, as "sm_90a"."""
    # The packages' static libraries lie where nvcc does not look.
    nvcc = find_nvcc()
    folder = pathlib.Path(nvcc).parent.parent / "lib" if nvcc else None
    links = (f"-L{folder}",) if folder and (folder / "libcudart_static.a").exists() else ()
    return Recipe(
        name=f"jspec-{architecture}",
        language="CUDA C++",
        compiler=nvcc and shlex.quote(nvcc),
        variable="CUDA_HOME",
        sources=sorted(_CUDA.glob("*.cu")),
        headers=sorted(_CUDA.glob("*.cuh")),
        options=(*_CUDA_OPTIONS, f"-arch={architecture}"),
        link_options=links,
    )


def cuda_handlers() -> list[str]:
    """Returns the names of the handlers that the CUDA C++ defines."""
    define = re.compile(r"^JSPEC_CUDA_HANDLER\((\w+)", re.MULTILINE)
    texts = (path.read_text() for path in sorted(_CUDA.glob("*.cu")))
    return [name for text in texts for name in define.findall(text)]


@functools.cache
def _prepare_cuda(capability: str | None) -> ctypes.CDLL | None:
    """Returns the library for a compute capability; for none, that for programs to be compiled."""

    def load() -> tuple[ctypes.CDLL, Iterable[str]]:
        if capability is None:
            return load_library(cuda_recipe(_FOREIGN_ARCHITECTURE)), cuda_handlers()
        library = load_library(cuda_recipe(architecture_of(capability)))
        library.jspec_cuda_problem.restype = ctypes.c_char_p
        if problem := library.jspec_cuda_problem():
            raise OSError(f"the CUDA C++ kernels do not load: {problem.decode()}")
        return library, cuda_handlers()

    return _prepare(load, "CUDA", "kernels in CUDA C++: XLA computes everything")


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    """Returns a float32 result's shape."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def in_cpp(
    name: str, result: Callable[..., Any], takes: Callable[..., bool] = lambda *operands: True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Lets C++ compute an operation written in JAX, for the operands that the C++ takes.

    `result` tells the shapes of the results: tracing the JAX for them would slow down every start.
    """

    def decorate(reference: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(reference)
        def operation(*operands: Any) -> Any:
            if takes(*operands) and is_available():
                return call(name, reference, result(*operands), *operands)
            return reference(*operands)

        return operation

    return decorate


def call(name: str, reference: Callable[..., Any], result: Any, *operands: Any) -> Any:
    """Returns what the reference returns, up to rounding, computed by a function in C++.

    The one exception is attention for a query that may see nothing: C++ returns zeros, the
    reference the mean of all values. Derivatives are the reference's.
    """
    return with_derivatives_of(reference, functools.partial(_call, name, result), *operands)


# Under jit, so that the call stays its own function: within a loop that also carries an empty
# array, XLA would lose the call's interface.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _call(name: str, result: Any, *operands: Array) -> Any:
    function = jax.ffi.ffi_call(
        f"jspec_{name}", result, vmap_method="sequential", input_output_aliases=_IN_PLACE.get(name)
    )
    return function(*operands)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def with_derivatives_of(
    reference: Callable[..., Any], function: Callable[..., Any], *operands: Any
) -> Any:
    """Returns function(*operands); to differentiate it computes the reference instead."""
    return function(*operands)


@with_derivatives_of.defjvp
def _jvp(
    reference: Callable[..., Any],
    function: Callable[..., Any],
    operands: tuple[Any, ...],
    tangents: tuple[Any, ...],  # an integer operand's is no array of JAX, but NumPy's float0
) -> tuple[Any, Any]:
    return jax.jvp(reference, operands, tangents)

"""Compiles C++ and CUDA C++ sources, once, into a library in the user's cache."""

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

import jax

from jspec.common.user_cache import cache_dir

_SOURCES = pathlib.Path(__file__).parent / "cpp"
# -ffp-contract=off: the compiler must not fuse a multiplication and an addition in one loop and not
# in another, or results would depend on the number of rows. -fno-strict-aliasing: vectors are read
# where numbers of other types were written.
_OPTIONS = (
    "-std=gnu++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC",
    "-pthread", "-w",
)  # fmt: skip
_COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 240


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a library is made of.

    Attributes:
      name: of the library's file, before its fingerprint.
      language: that the compiler compiles, as a reader of its errors calls it.
      compiler: a command, which may have options; None where none was found.
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


def fingerprint() -> str:
    """Returns that of the C++ for this processor."""
    return _cpp().fingerprint()


def load_library(recipe: Recipe | None = None) -> ctypes.CDLL:
    """Returns a library, from the user's cache if it is there, else compiled now.

    Without a recipe it is the C++ for this processor.

    Raises:
      OSError: the library cannot be built or loaded; the text says why.
    """
    recipe = recipe or _cpp()
    path = recipe.path()
    if _is_whole(path):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(path))
    return _build(recipe, path)


def _cpp() -> Recipe:
    return Recipe(
        name="jspec",
        language="C++",
        compiler=_compiler(),
        variable="CXX",
        sources=sorted(_SOURCES.glob("*.cc")),
        headers=sorted(_SOURCES.glob("*.h")),
        options=_OPTIONS,
        machine=_processor(),
    )


def _is_whole(path: pathlib.Path) -> bool:
    """Returns whether a library is as it was built; loading a damaged one crashes the process."""
    try:
        return path.with_suffix(".sha256").read_text() == _digest(path)
    except OSError:
        return False


def _digest(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _compiler() -> str | None:
    """Returns `$CXX`, or the first C++ compiler of this machine, or None."""
    return os.environ.get("CXX") or next(filter(None, map(shutil.which, _COMPILERS)), None)


def _processor() -> str:
    """Returns the processor's features: different machines may share one home folder."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = [line for line in lines if line.startswith(("flags", "Features"))]
    return "".join([platform.system(), platform.machine(), platform.processor(), *features[:1]])


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

"""Compiles the C++ sources for this processor, once, into a library in the user's cache."""

import concurrent.futures
import contextlib
import ctypes
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
_SECONDS = 120


def fingerprint() -> str:
    """Returns a hash of all that decides the library: sources, options, headers, processor."""
    sources = [path.read_text() for path in sorted([*_SOURCES.glob("*.cc"), *_SOURCES.glob("*.h")])]
    parts = (*sources, *_OPTIONS, importlib.metadata.version("jaxlib"), _compiler(), _processor())
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


def load_library() -> ctypes.CDLL:
    """Returns the library, from the user's cache if it is there, else compiled now.

    Raises:
      OSError: the library cannot be built or loaded; the text says why.
    """
    path = cache_dir() / "native" / f"jspec-{fingerprint()}.so"
    if _is_whole(path):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(path))
    return _build(path)


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


def _build(path: pathlib.Path) -> ctypes.CDLL:
    """Compiles in a folder beside the path, and renames the result: no one sees a part of it."""
    compiler = _compiler()
    if compiler is None:
        raise OSError("no C++ compiler was found")
    path.parent.mkdir(parents=True, exist_ok=True)
    run = functools.partial(_run, compiler)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = pathlib.Path(folder) / path.name
        goals = {source: built.with_name(f"{source.stem}.o") for source in _SOURCES.glob("*.cc")}
        include = f"-I{jax.ffi.include_dir()}"
        commands = [[include, "-c", str(source), "-o", str(goals[source])] for source in goals]
        # No more compilers at once than cores: each takes several hundred megabytes.
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(run, commands))
        run(["-shared", *map(str, goals.values()), "-o", str(built)])
        library, digest = ctypes.CDLL(str(built)), built.with_suffix(".sha256")
        digest.write_text(_digest(built))
        built.replace(path)
        digest.replace(path.with_suffix(".sha256"))  # last: without it the library is built again
    return library


def _run(compiler: str, arguments: Sequence[str]) -> None:
    command = [*shlex.split(compiler), *_OPTIONS, *arguments]
    options = {"capture_output": True, "text": True, "errors": "replace", "check": True}
    try:
        subprocess.run(command, timeout=_SECONDS, **options)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"status {error.returncode}"]
        said = next((line for line in lines if "error" in line), lines[0])
        raise OSError(f"{compiler} failed: {said}") from None
    except FileNotFoundError:
        raise OSError(f"there is no C++ compiler {compiler} ($CXX)") from None
    except subprocess.TimeoutExpired:
        raise OSError(f"{compiler} took more than {_SECONDS} s") from None

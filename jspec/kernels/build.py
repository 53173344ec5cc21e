"""Compiles C++ for XLA's foreign function interface, once, for this processor."""

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

_HERE = pathlib.Path(__file__).parent / "cpp"
# Without strict aliasing, as vectors are read where numbers of other types were written.
_OPTIONS = (
    "-std=gnu++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC",
    "-pthread", "-w",
)  # fmt: skip
_COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 120


def fingerprint() -> str:
    """Returns a name for what decides the library: sources, options, JAX's headers, processor."""
    sources = [path.read_text() for path in sorted([*_HERE.glob("*.cc"), *_HERE.glob("*.h")])]
    parts = (*sources, *_OPTIONS, importlib.metadata.version("jaxlib"), _compiler(), _processor())
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


def load_library() -> ctypes.CDLL:
    """Returns the library of the sources in this folder, from the user's cache if it is there.

    Raises:
      OSError: it cannot be built or loaded; the text says why.
    """
    path = cache_dir() / "native" / f"jspec-{fingerprint()}.so"
    if _is_whole(path):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(path))
    return _build(path)


def _is_whole(path: pathlib.Path) -> bool:
    """Returns whether a library is as it was built: a part of one would crash the process."""
    try:
        return _digest_path(path).read_text() == _digest(path)
    except OSError:
        return False


def _digest_path(path: pathlib.Path) -> pathlib.Path:
    return path.with_suffix(".sha256")


def _digest(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _compiler() -> str | None:
    """Returns `$CXX`, or the first C++ compiler of this machine, or None."""
    return os.environ.get("CXX") or next(filter(None, map(shutil.which, _COMPILERS)), None)


def _processor() -> str:
    """Returns what the processor can do: a home folder may be shared by different machines."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = [line for line in lines if line.startswith(("flags", "Features"))]
    return "".join([platform.system(), platform.machine(), platform.processor(), *features[:1]])


def _build(path: pathlib.Path) -> ctypes.CDLL:
    """Compiles beside the goal and puts it in place by renaming: it is never seen half-written."""
    compiler = _compiler()
    if compiler is None:
        raise OSError("no C++ compiler was found")
    path.parent.mkdir(parents=True, exist_ok=True)
    run = functools.partial(_run, compiler)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = pathlib.Path(folder) / path.name
        goals = {source: built.with_name(f"{source.stem}.o") for source in _HERE.glob("*.cc")}
        include = f"-I{jax.ffi.include_dir()}"
        commands = [[include, "-c", str(source), "-o", str(goals[source])] for source in goals]
        # One compiler a core: each takes several hundred megabytes.
        with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            list(pool.map(run, commands))
        run(["-shared", *map(str, goals.values()), "-o", str(built)])
        library = ctypes.CDLL(str(built))
        digest = _digest_path(built)
        digest.write_text(_digest(built))
        built.replace(path)
        digest.replace(_digest_path(path))
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

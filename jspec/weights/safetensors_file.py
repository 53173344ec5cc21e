"""Single safetensors files: opened, read and written, each failure in one line."""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jspec.common.errors import InputError


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[None]:
    import safetensors

    try:
        path.open("rb").close()  # safetensors reports a folder, or no permission, as no such file
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{path}: truncated or damaged safetensors ({error})") from None


def open_safetensors(path: pathlib.Path) -> Any:
    """Returns the open file, memory-mapped; a tensor is read when it is asked for.

    Raises:
      InputError: the file is missing, truncated or damaged.
    """
    import safetensors

    with _reading(path):
        return safetensors.safe_open(path, framework="np")


def load_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns all tensors of a file by name.

    Raises:
      InputError: the file is missing, truncated or damaged.
    """
    import safetensors.numpy

    with _reading(path):
        return safetensors.numpy.load_file(path)


def save_safetensors(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes tensors, readable for everybody.

    Raises:
      OSError: the file cannot be written.
    """
    import safetensors.numpy

    try:
        safetensors.numpy.save_file(dict(tensors), path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:  # for example a full disk
        raise OSError(str(error)) from None
    path.chmod(0o644)  # the library writes for the owner alone

"""Single safetensors files, each failure in one line; matrices may be int8, in half the bytes.

```
  NAME         [o, i]  int8       round(weight / scale)
  NAME_scale   [o, 1]  float32    largest weight of the row / 127
```
"""

import collections
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec.common.errors import InputError
from jspec.weights.assemble import as_dtype

_SUFFIX = "_scale"


def open_safetensors(path: pathlib.Path) -> Any:
    """Returns the open file, memory-mapped; a tensor is read when it is asked for.

    Raises:
      InputError: the file is missing, truncated or damaged.
    """
    import safetensors

    try:
        path.open("rb").close()  # safetensors reports a folder, or no permission, as no such file
        return safetensors.safe_open(path, framework="np")
    except safetensors.SafetensorError as error:
        raise InputError(f"{path}: truncated or damaged safetensors ({error})") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def load_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns all tensors of a file by name; see `open_safetensors`."""
    import safetensors.numpy

    open_safetensors(path)  # which says what is wrong with it
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


def to_int8(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tensors with every matrix of floats rounded to int8, one scale a row."""
    floats = as_dtype("bfloat16"), as_dtype("float32")
    stored = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or tensor.dtype not in floats:
            stored[name] = tensor
            continue
        values = tensor.astype(np.float32)
        scale = np.max(np.abs(values), axis=1, keepdims=True) / 127
        steps = np.divide(values, scale, out=np.zeros_like(values), where=scale > 0)
        stored |= {name: np.rint(steps).astype(np.int8), name + _SUFFIX: scale}
    return stored


class FloatTensors(collections.UserDict[str, np.ndarray]):
    """Tensors as `to_int8` returns them; an int8 one becomes float32 only when it is asked for."""

    def __init__(self, stored: Mapping[str, np.ndarray]) -> None:
        integers = [name for name, tensor in stored.items() if tensor.dtype == np.int8]
        self._scales = {name: stored.get(name + _SUFFIX) for name in integers}
        scale_names = {name + _SUFFIX for name in integers}
        self.data = {name: stored[name] for name in stored if name not in scale_names}

    def __getitem__(self, name: str) -> np.ndarray:
        values = self.data[name]
        if name not in self._scales:
            return values
        scale = self._scales[name]
        if scale is None or scale.shape != (len(values), 1):
            raise InputError(f"{name}: expected {name}{_SUFFIX} with a scale for each row of int8")
        return values.astype(np.float32) * scale.astype(np.float32)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape; makes no floats."""
        return self.data[name].shape

"""Matrices stored as int8 in a safetensors file, which halves the bytes of a head.

```
  NAME         [o, i]  int8       round(weight / scale)
  NAME_scale   [o, 1]  float32    largest weight of the row / 127
```

An EAGLE-3 head runs in these integers; heads of the other kinds are read back as floats.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from jspec.common.errors import InputError
from jspec.weights.assemble import as_dtype

_SUFFIX = "_scale"


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


class FloatTensors(Mapping[str, np.ndarray]):
    """Tensors by name; one stored as int8 becomes float32 only when it is asked for."""

    def __init__(self, stored: Mapping[str, np.ndarray]) -> None:
        """Takes tensors as `to_int8` returns them."""
        self._stored = stored
        integers = [name for name, tensor in stored.items() if tensor.dtype == np.int8]
        self._scales = frozenset(name + _SUFFIX for name in integers)

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns a tensor, as a new array if it is stored as int8.

        Raises:
          InputError: integers without a scale for each row.
        """
        if name in self._scales:
            raise KeyError(name)
        values = self._stored[name]
        if values.dtype != np.int8:
            return values
        scale = self._stored.get(name + _SUFFIX)
        if scale is None or scale.shape != (len(values), 1):
            raise InputError(f"{name}: expected {name}{_SUFFIX} with a scale for each row of int8")
        return values.astype(np.float32) * scale.astype(np.float32)

    def __contains__(self, name: object) -> bool:
        """Returns whether there is a tensor of that name; makes no floats."""
        return name in self._stored and name not in self._scales

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape; makes no floats."""
        return self._stored[name].shape

    def __iter__(self) -> Iterator[str]:
        """Yields the names, without those of scales."""
        return (name for name in self._stored if name not in self._scales)

    def __len__(self) -> int:
        """Returns the number of tensors, scales not counted."""
        return sum(1 for _ in self)

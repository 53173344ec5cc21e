"""Matrices as int8 in a safetensors file: a head in half the bytes.

```
  NAME         [o, i]  int8       round(weight / scale)
  NAME_scale   [o, 1]  float32    largest weight of the row / 127
```

A head of EAGLE-3 runs in them; those of the other kinds are read back as floats.
"""

import numpy as np

from jspec.errors import InputError
from jspec.weights.assemble import as_dtype

_SUFFIX = "_scale"


def to_int8(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns tensors, every matrix of floats rounded to int8, each row with a scale of its own."""
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


def from_int8(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns tensors, float32 where there are int8 ones and their scales.

    Raises:
      InputError: integers without the scale of each row.
    """
    found = dict(tensors)
    for name, values in tensors.items():
        if values.dtype != np.int8:
            continue
        scale = found.pop(name + _SUFFIX, None)
        if scale is None or scale.shape != (len(values), 1):
            raise InputError(f"{name}: expected {name}{_SUFFIX} with a scale for each row of int8")
        found[name] = values.astype(np.float32) * scale.astype(np.float32)
    return found

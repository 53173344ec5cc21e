"""A parameter, and the tensors of a checkpoint that it is made of."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

Path = tuple[str, ...]
Shape = tuple[int, ...]
WHOLE, ALL = (Ellipsis,), slice(None)  # slices of a parameter, and of an axis


class Part(NamedTuple):
    """A Hugging Face tensor, or some of its rows, and where its elements are in a parameter.

    Attributes:
      name: of the tensor.
      shape: of the part.
      index: the slice of the parameter that holds its elements.
      rows: the rows of the tensor; None for all.
      offset: is added to its elements.
    """

    name: str
    shape: Shape
    index: tuple[Any, ...] = WHOLE
    rows: slice | None = None
    offset: float = 0.0

    def take(self, param: np.ndarray) -> np.ndarray:
        """Returns the part, contiguous, out of its parameter."""
        part = param[self.index].reshape(self.shape)
        return np.ascontiguousarray(part - part.dtype.type(self.offset) if self.offset else part)

    def put(self, tensor: np.ndarray) -> np.ndarray:
        """Returns the part of the tensor as it stands in the parameter."""
        part = tensor if self.rows is None else tensor[self.rows]
        return part + part.dtype.type(self.offset) if self.offset else part


class Parameter(NamedTuple):
    """One parameter, by its keys in the nested dict; its parts set each element exactly once."""

    path: Path
    shape: Shape
    parts: tuple[Part, ...]

    def dtype_in(self, dtype: np.dtype) -> np.dtype:
        """Returns the dtype of this parameter in a model of that dtype."""
        # Norms whose weights are stored less 1 lose bits when the 1 is added in bfloat16.
        return np.dtype(np.float32) if any(part.offset for part in self.parts) else dtype

    def pack(self, tensors: Mapping[str, np.ndarray], dtype: np.dtype) -> np.ndarray:
        """Returns the parameter, [*self.shape] in `dtype`, made of its tensors."""
        if len(self.parts) == 1:
            part = self.parts[0]
            return part.put(tensors[part.name]).reshape(self.shape).astype(dtype, copy=False)
        param = np.empty(self.shape, dtype)
        for part in self.parts:
            target = param[part.index]
            target[...] = part.put(tensors[part.name]).reshape(target.shape)
        return param

    def unpack(self, param: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the tensors that `pack` makes this parameter from."""
        names = dict.fromkeys(part.name for part in self.parts)
        # The parts of a fused tensor are in the order of its rows.
        return {
            name: np.concatenate([part.take(param) for part in self.parts if part.name == name])
            for name in names
        }


def tensor_shapes(parameters: Iterable[Parameter]) -> dict[str, Shape]:
    """Returns the shape of every tensor that these parameters are made of."""
    shapes: dict[str, Shape] = {}
    for part in (part for parameter in parameters for part in parameter.parts):
        rows = part.shape[0] + (shapes[part.name][0] if part.rows and part.name in shapes else 0)
        shapes[part.name] = (rows, *part.shape[1:])
    return shapes


def one_tensor(path: Path, name: str, shape: Shape) -> Parameter:
    """Returns a parameter that is one tensor of the same shape."""
    return Parameter(path, shape, (Part(name, shape),))


def linear(
    path: Path,
    out: Shape,
    num_inputs: int,
    parts: Mapping[str, tuple[Any, ...]],
    has_bias: bool = False,
    fused: str | None = None,
) -> list[Parameter]:
    """Returns a kernel [*out i] and perhaps its bias [*out].

    `parts` are Hugging Face's layers, whose weights are matrices, with their slices of `out`. With
    `fused` they are one layer of that name.
    """
    # A view of one number: a damaged config may name a shape that fits into no memory.
    sizes = [np.broadcast_to(False, out)[index].size for index in parts.values()]
    ends = np.cumsum(sizes).tolist()

    def make(kind: str, *shape: int) -> list[Part]:
        return [
            Part(f"{name}.{kind}", (size, *shape), index)
            if fused is None
            else Part(f"{fused}.{kind}", (size, *shape), index, slice(end - size, end))
            for (name, index), size, end in zip(parts.items(), sizes, ends, strict=True)
        ]

    weights, biases = make("weight", num_inputs), make("bias")
    kernel = Parameter(path, (*out, num_inputs), tuple(weights))
    bias = Parameter((*path[:-1], f"{path[-1]}_bias"), out, tuple(biases))
    return [kernel, bias] if has_bias else [kernel]

"""What folders with a trained head have in common: a config.json and one safetensors file.

A table (see `tensor_names`) says which tensors there are and where each goes; nothing may be
missing, left over, or of another shape.
"""

import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jspec.common.errors import InputError
from jspec.common.json_lines import read_json, save_json
from jspec.common.new_folder import new_folder
from jspec.weights.assemble import as_dtype
from jspec.weights.int8_tensors import FloatTensors, to_int8
from jspec.weights.safetensors_file import load_safetensors, save_safetensors
from jspec.weights.tensor_names import Parameter, Path

if TYPE_CHECKING:
    import jax

_OF_A_MODEL = "model.embed_tokens.weight"  # no head has it


def read_any_config(folder: pathlib.Path, what: str) -> dict[str, Any]:
    """Returns the config.json of a folder with `what`, unchecked.

    Raises:
      InputError: there is none, or it is damaged.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"{folder}: no config.json in the folder; expected one with {what}")
    return read_json(path)


def check_target(folder: pathlib.Path, sizes: Iterable[tuple[str, Any, int]]) -> None:
    """Checks that a head was made for a target.

    Args:
      folder: the head's.
      sizes: what is compared, such as "width"; the head's; the target's.

    Raises:
      InputError: one that differs.
    """
    for what, own, other in sizes:
        if own != other:
            raise InputError(
                f"{folder}: expected a head of the target's {what}, {other}; it has {own}"
            )


def read_tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a safetensors file, float32 where they are int8; see `read_stored`."""
    return dict(FloatTensors(read_stored(path)))


def read_stored(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a safetensors file as they are; see `int8_tensors`.

    Raises:
      InputError: it is missing, truncated or damaged.
    """
    if not path.exists():
        raise InputError(f"{path}: missing")
    return load_safetensors(path)


def pack_params(
    folder: pathlib.Path,
    tensors: Mapping[str, np.ndarray],
    rules: Sequence[Parameter],
    dtype: Any,
    finish: Callable[[Path, "jax.Array"], Any] = lambda _, leaf: leaf,
) -> dict[str, Any]:
    """Returns the parameters, on the default device.

    Args:
      folder: the head's, for messages.
      tensors: all there are.
      rules: where each goes.
      dtype: bfloat16 or float32.
      finish: what becomes of a parameter before the next is made, by its path.

    Raises:
      InputError: a tensor that is missing, unknown or of another shape.
    """
    import jax

    expected = {part.name: part.shape for rule in rules for part in rule.parts}
    # Both sets: a tensor too many is an error as well as one too few.
    for name in sorted(expected.keys() | tensors.keys()):
        shape = _shape(tensors, name) if name in tensors else None
        if shape != expected.get(name):
            raise InputError(
                f"{folder}: {name}: expected {_shape_text(expected.get(name))}, found "
                f"{_shape_text(shape)}"
            )
    return unflatten_dict(
        {
            # Each parameter is finished before the next, which keeps the peak of memory low.
            rule.path: finish(rule.path, jax.device_put(rule.pack(tensors, as_dtype(dtype))))
            for rule in rules
        }
    )


def _shape(tensors: Mapping[str, np.ndarray], name: str) -> tuple[int, ...]:
    # `FloatTensors` makes a float copy when it is indexed; its shape costs nothing.
    return tensors.shape(name) if isinstance(tensors, FloatTensors) else tensors[name].shape


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "nothing" if shape is None else str(list(shape))


def unpack_params(rules: Sequence[Parameter], params: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the tensors that `pack_params` makes the parameters from."""
    leaves = flatten_dict(params)
    tensors: dict[str, np.ndarray] = {}
    for rule in rules:
        tensors |= rule.unpack(np.asarray(leaves[rule.path]))
    return tensors


def write_head(
    folder: pathlib.Path, name: str, tensors: dict[str, np.ndarray], config: dict[str, Any]
) -> None:
    """Writes a folder, which appears when it is complete.

    Args:
      folder: the new one.
      name: of the safetensors file.
      tensors: what is in it.
      config: what is in config.json.

    Raises:
      InputError: the folder exists or cannot be written.
    """
    with new_folder(folder) as partial:
        save_safetensors(partial / name, tensors)
        save_json(partial / "config.json", config)


def round_head(source: pathlib.Path, output: pathlib.Path) -> None:
    """Writes a head again with its matrices in int8.

    Args:
      source: folder with a head of any kind.
      output: the new one.

    Raises:
      InputError: the source cannot be read, has other than one file of tensors, or is a whole
        model; the output exists or cannot be written.
    """
    files = list(source.glob("*.safetensors"))
    if len(files) != 1:
        raise InputError(f"{source}: expected a head's one .safetensors, found {len(files)}")
    config = read_json(source / "config.json")
    tensors = read_tensors(files[0])
    if _OF_A_MODEL in tensors:
        raise InputError(f"{source}: expected a trained head, got a whole model")
    write_head(output, files[0].name, to_int8(tensors), config)

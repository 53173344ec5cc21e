"""Loading and saving a trained head, whatever its kind: a `HeadFormat` holds the differences."""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict

from jspec.common.errors import InputError
from jspec.drafters.heads.folder import (
    check_target,
    pack_params,
    read_any_config,
    read_tensors,
    unpack_params,
    write_head,
)
from jspec.models.config import LlamaConfig
from jspec.weights.tensor_names import Parameter

# What a config.json says of the target: in words, its key, and the field of LlamaConfig.
_TARGET_ENTRIES = (
    ("width", "hidden_size", "embed_dim"),
    ("vocabulary", "vocab_size", "vocab_size"),
    ("layers", "num_hidden_layers", "num_layers"),
)


class HeadSizes:
    """Base of a dataclass whose fields are numbers of at least 1; a ValueError names another."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            # `type` and not isinstance: True is an int in Python.
            if type(value) is not int or value < 1:
                raise ValueError(f"expected {name} as a number of at least 1, got {value!r}")


class LoadedParams(NamedTuple):
    """A head ready to run.

    Attributes:
      config: its shape.
      params: as its module's `init_..._params` returns them.
    """

    config: Any
    params: dict[str, Any]


class HeadFormat(NamedTuple):
    """The folder layout of one kind of head.

    Attributes:
      what: the kind, in words.
      file: the name of the safetensors file.
      architecture: as config.json has it.
      keys: entries of config.json with the fields of the head's config, by the field's name; the
        first is an entry that no other kind has.
      read_config: (config.json, target, tensors) -> the head's config; raises ValueError for a bad
        one.
      rules: the table from the head's tensors to its parameters.
      sizes: what the tensors themselves say of the target, for `check_target`.
    """

    what: str
    file: str
    architecture: str
    keys: Mapping[str, str]
    read_config: Callable[[dict[str, Any], LlamaConfig, Mapping[str, np.ndarray]], Any]
    rules: Callable[[Any], list[Parameter]]
    sizes: Callable[[Any, Mapping[str, np.ndarray]], list[tuple[str, Any, int]]] = lambda *_: []


def load_head(
    layout: HeadFormat, folder: pathlib.Path, target: LlamaConfig, dtype: Any = "float32"
) -> LoadedParams:
    """Loads a head.

    Args:
      layout: of its folder.
      folder: with config.json and the safetensors file.
      target: the model that it was trained for.
      dtype: bfloat16 or float32.

    Raises:
      InputError: anything missing, damaged, of another shape, or of another target.
    """
    # The first key tells the kinds of heads apart.
    path, key = folder / "config.json", next(iter(layout.keys.values()))
    raw = read_any_config(folder, layout.what)
    if key not in raw:
        raise InputError(f"{path}: expected {layout.what}; it has no {key}")
    # Read first, as published folders may hold more heads than their config.json says.
    tensors = read_tensors(folder / layout.file)
    try:
        config = layout.read_config(raw, target, tensors)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    check_target(folder, _target_sizes(raw, target) + layout.sizes(config, tensors))
    return LoadedParams(config, pack_params(folder, tensors, layout.rules(config), dtype))


def save_head(
    layout: HeadFormat,
    folder: pathlib.Path,
    config: Any,
    params: dict[str, Any],
    target: LlamaConfig,
    *,
    base_model: str | None = None,
) -> None:
    """Writes a head; the folder appears when it is complete.

    Args:
      layout: of the folder.
      folder: the new one.
      config: of the head.
      params: its parameters.
      target: the model that it was trained for.
      base_model: the target's name, for other programs that read such a folder.

    Raises:
      InputError: the folder exists or cannot be written.
    """
    tensors = unpack_params(layout.rules(config), params)
    text = {entry: getattr(target, field) for _, entry, field in _TARGET_ENTRIES}
    text |= {"architectures": [layout.architecture]}
    text |= {entry: getattr(config, field) for field, entry in layout.keys.items()}
    text |= {"dtype": str(next(iter(flatten_dict(params).values())).dtype)}
    if base_model is not None:
        text["base_model_name_or_path"] = base_model
    write_head(folder, layout.file, tensors, text)


def _target_sizes(raw: dict[str, Any], target: LlamaConfig) -> list[tuple[str, Any, int]]:
    """Returns what config.json says of the target for `check_target`, as far as it does."""
    return [
        (what, raw[key], getattr(target, one)) for what, key, one in _TARGET_ENTRIES if key in raw
    ]

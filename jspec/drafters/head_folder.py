"""Folders with a trained head: a config.json and one safetensors file, loaded and saved.

A table (see `tensor_names`) says which tensors there are and where each goes; nothing may be
missing, left over, or of another shape. A `HeadFormat` holds what differs between kinds of heads.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jspec.common.errors import InputError
from jspec.common.json_lines import read_json, save_json
from jspec.common.new_files import new_folder
from jspec.models.config import DecoderConfig
from jspec.weights.assemble import as_dtype
from jspec.weights.parameter import Parameter, Path
from jspec.weights.safetensors_file import FloatTensors, load_safetensors, save_safetensors, to_int8

_OF_A_MODEL = "model.embed_tokens.weight"  # no head has it
# What a config.json says of the target: in words, its key, and the field of DecoderConfig.
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


@dataclasses.dataclass(frozen=True)
class FeatureHead:
    """The shape of a head that reads the target's features: outputs of some of its layers.

    Attributes:
      layer: the shape of its decoder layers; `vocab_size` counts the tokens that it can propose.
      target_vocab_size: rows of the target's embedding.
      feature_layers: the target's layers that it reads: 0 is the embedding, i the i-th block.
      target_num_layers: of the target; 0 if it is not known.
      mask_id: the token that stands for a draft in a head that drafts in one pass; else None.
      has_embedding: whether it embeds tokens by its own table.
    """

    layer: DecoderConfig
    target_vocab_size: int
    feature_layers: tuple[int, ...]
    target_num_layers: int = 0
    mask_id: int | None = dataclasses.field(default=None, kw_only=True)
    has_embedding: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        is_id = type(self.mask_id) is int and 0 <= self.mask_id < self.target_vocab_size
        if self.mask_id is not None and not is_id:
            raise ValueError(
                f"expected mask_token_id from 0 to {self.target_vocab_size - 1}, got "
                f"{self.mask_id!r}"
            )
        if self.layer.vocab_size > self.target_vocab_size:
            raise ValueError(
                f"expected at most the target's {self.target_vocab_size} tokens, got "
                f"{self.layer.vocab_size}"
            )

    @property
    def feature_dim(self) -> int:
        """Width of the features before they are fused."""
        return len(self.feature_layers) * self.layer.embed_dim

    @property
    def plain_layer(self) -> DecoderConfig:
        """The shape of its layers with the target's vocabulary, as config.json has it."""
        return dataclasses.replace(self.layer, vocab_size=self.target_vocab_size)

    def check_target(self, folder: pathlib.Path, target: DecoderConfig) -> None:
        """Checks that it was trained for a target of that shape.

        Raises:
          InputError: another width, vocabulary or number of layers; or layers that are not there.
        """
        depth = self.target_num_layers or target.num_layers
        sizes = [
            ("width", self.layer.embed_dim, target.embed_dim),
            ("vocabulary", self.target_vocab_size, target.vocab_size),
            ("layers", depth, target.num_layers),
        ]
        check_target(folder, sizes)
        if not all(0 <= layer <= target.num_layers for layer in self.feature_layers):
            layers = list(self.feature_layers)
            raise InputError(f"{folder}: it reads layers {layers}, of {target.num_layers}")


class LoadedHead(NamedTuple):
    """A head ready to run: its shape, its module's parameters, and its folder."""

    config: Any
    params: dict[str, Any]
    name: str


class HeadFormat(NamedTuple):
    """The folder layout of one kind of head.

    Attributes:
      what: the kind, in words.
      architecture: as config.json has it.
      keys: entries of config.json by the fields of the head's config; the first is an entry that no
        other kind has.
      read_config: (config.json, target, tensors) -> the head's config; raises ValueError if
        config.json is bad.
      rules: the table from the head's tensors to its parameters.
      file: the name of the safetensors file.
      sizes: what the tensors themselves say of the target, for `check_target`.
    """

    what: str
    architecture: str
    keys: Mapping[str, str]
    read_config: Callable[[dict[str, Any], DecoderConfig, Mapping[str, np.ndarray]], Any]
    rules: Callable[[Any], list[Parameter]]
    file: str = "model.safetensors"
    sizes: Callable[[Any, Mapping[str, np.ndarray]], list[tuple[str, Any, int]]] = lambda *_: []


def load_head(
    layout: HeadFormat, folder: pathlib.Path, target: DecoderConfig, dtype: Any = "float32"
) -> LoadedHead:
    """Loads a head that was trained for a target, in bfloat16 or float32.

    Raises:
      InputError: anything missing, damaged, of another shape, or of another target.
    """
    # The first key tells the kinds of heads apart.
    path, key = folder / "config.json", next(iter(layout.keys.values()))
    raw = read_any_config(folder, layout.what)
    if key not in raw:
        raise InputError(f"{path}: expected {layout.what}; it has no {key}")
    # Read first, as published folders may hold more heads than their config.json says.
    tensors = FloatTensors(read_stored(folder / layout.file))
    try:
        config = layout.read_config(raw, target, tensors)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    known = [entry for entry in _TARGET_ENTRIES if entry[1] in raw]
    sizes = [(what, raw[key], getattr(target, field)) for what, key, field in known]
    check_target(folder, sizes + layout.sizes(config, tensors))
    params = pack_params(folder, tensors, layout.rules(config), dtype)
    return LoadedHead(config, params, str(folder))


def save_head(
    layout: HeadFormat,
    folder: pathlib.Path,
    config: Any,
    params: dict[str, Any],
    target: DecoderConfig,
    *,
    base_model: str | None = None,
) -> None:
    """Writes a head that was trained for a target; the folder appears when it is complete.

    `base_model` is the target's name, for other programs that read such a folder.

    Raises:
      InputError: the folder exists or cannot be written.
    """
    text = {entry: getattr(target, field) for _, entry, field in _TARGET_ENTRIES}
    text |= {"architectures": [layout.architecture]}
    text |= {entry: getattr(config, field) for field, entry in layout.keys.items()}
    text |= {"dtype": str(next(iter(flatten_dict(params).values())).dtype)}
    if base_model is not None:
        text["base_model_name_or_path"] = base_model
    write_head(folder, layout.file, unpack_params(layout.rules(config), params), text)


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
    """Checks sizes of a head: what is compared, such as "width"; the head's; the target's.

    Raises:
      InputError: one that differs.
    """
    for what, size, expected in sizes:
        if size != expected:
            raise InputError(
                f"{folder}: expected a head of the target's {what}, {expected}; it has {size}"
            )


def read_stored(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a safetensors file as they are; see `safetensors_file`.

    Raises:
      InputError: it is missing, truncated or damaged.
    """
    if not path.exists():
        raise InputError(f"{path}: missing")
    return load_safetensors(path)


def pack_params(
    folder: pathlib.Path,
    tensors: FloatTensors,
    rules: Sequence[Parameter],
    dtype: Any,
    finish: Callable[[Path, jax.Array], Any] = lambda _, leaf: leaf,
) -> dict[str, Any]:
    """Returns the parameters of a folder's head, on the default device.

    All of the tensors are used; `rules` say where each goes (see `tensor_names`), in bfloat16 or
    float32. A parameter is finished, by its path, before the next is made.

    Raises:
      InputError: a tensor that is missing, unknown or of another shape.
    """
    expected = {part.name: part.shape for rule in rules for part in rule.parts}
    # By `shape`, as `FloatTensors` make a float copy when they are indexed.
    shapes_there = {name: tensors.shape(name) for name in tensors}
    # Both sets: a tensor too many is an error as well as one too few.
    for name in sorted(expected.keys() | shapes_there.keys()):
        if shapes_there.get(name) != expected.get(name):
            wanted, got = (_shape_text(shapes.get(name)) for shapes in (expected, shapes_there))
            raise InputError(f"{folder}: {name}: expected {wanted}, found {got}")
    return unflatten_dict(
        {
            # Each parameter is finished before the next, which keeps the peak of memory low.
            rule.path: finish(rule.path, jax.device_put(rule.pack(tensors, as_dtype(dtype))))
            for rule in rules
        }
    )


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "nothing" if shape is None else str(list(shape))


def unpack_params(rules: Sequence[Parameter], params: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the tensors that `pack_params` makes the parameters from."""
    leaves = flatten_dict(params)
    tensors: dict[str, np.ndarray] = {}
    for rule in rules:
        tensors |= rule.unpack(np.asarray(leaves[rule.path]))
    return tensors


def read_ids(
    folder: pathlib.Path, tensors: dict[str, np.ndarray], config: FeatureHead
) -> np.ndarray:
    """Takes the mapping out of the tensors; returns the target's id of every draft id, [u].

    Raises:
      InputError: it is missing, of another size, or names no ids of the target.
    """
    num_drafts = config.layer.vocab_size
    offsets = tensors.pop("d2t", None)
    is_known = tensors.pop("t2d", None)
    if offsets is None:
        if num_drafts != config.target_vocab_size:
            raise InputError(f"{folder}: d2t: missing")
        return np.arange(num_drafts, dtype=np.int32)
    if offsets.shape != (num_drafts,):
        raise InputError(f"{folder}: d2t: expected [{num_drafts}], found {list(offsets.shape)}")
    # `d2t` holds differences, not ids.
    ids = np.arange(num_drafts) + offsets.astype(np.int64)
    if len(np.unique(ids)) < num_drafts or ids.min() < 0 or ids.max() >= config.target_vocab_size:
        raise InputError(f"{folder}: d2t: expected different ids of the target's vocabulary")
    # The two say the same thing twice: where they differ, one is damaged.
    if is_known is not None and not np.array_equal(np.flatnonzero(is_known), np.sort(ids)):
        raise InputError(f"{folder}: d2t and t2d disagree")
    return ids.astype(np.int32)


def in_order(tensors: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Sorts what the tensors have of each token that a head proposes; returns the sorted ids."""
    # Published heads may list their tokens in any order. Of equal logits the first is taken, in the
    # head as in the target: the smallest id's.
    order = np.argsort(ids)
    if not np.array_equal(order, np.arange(len(ids))):
        of_drafts = "lm_head.", "markov_head.markov_w2."
        heads = [name for name in tensors if name.startswith(of_drafts)]
        tensors |= {name: tensors[name][order] for name in heads}
    return ids[order]


def written_ids(config: FeatureHead, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the tensors that `read_ids` reads."""
    is_known = np.zeros([config.target_vocab_size], bool)
    is_known[ids] = True
    return {"d2t": ids.astype(np.int64) - np.arange(len(ids)), "t2d": is_known}


def write_head(
    folder: pathlib.Path, name: str, tensors: dict[str, np.ndarray], config: dict[str, Any]
) -> None:
    """Writes config.json and a safetensors file; the folder appears when it is complete.

    Raises:
      InputError: the folder exists or cannot be written.
    """
    with new_folder(folder) as partial:
        save_safetensors(partial / name, tensors)
        save_json(partial / "config.json", config)


def round_head(source: pathlib.Path, output: pathlib.Path) -> None:
    """Writes a head of any kind again with its matrices in int8.

    Raises:
      InputError: the source cannot be read, has other than one file of tensors, or is a whole
        model; the output exists or cannot be written.
    """
    files = list(source.glob("*.safetensors"))
    if len(files) != 1:
        raise InputError(f"{source}: expected a head's one .safetensors, found {len(files)}")
    config = read_json(source / "config.json")
    tensors = dict(FloatTensors(read_stored(files[0])))
    if _OF_A_MODEL in tensors:
        raise InputError(f"{source}: expected a trained head, got a whole model")
    write_head(output, files[0].name, to_int8(tensors), config)

"""Parameters from Hugging Face tensors and back, strictly: nothing missing, nothing left over."""

import concurrent.futures
import os
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np

from jspec.common.errors import InputError
from jspec.models.config import LlamaConfig
from jspec.weights.quantize import check_kind, is_quantizable, quantize
from jspec.weights.room import check_room
from jspec.weights.rules import Part, Rule, Shape, flatten, make_rules, nest

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_NUM_NAMED = 4


class TensorSource(Protocol):
    """An open checkpoint, its tensors named and shaped as in Hugging Face's.

    Attributes:
      where: the checkpoint's path, for messages.
      shapes: the shape of every tensor in it.
    """

    where: str
    shapes: dict[str, Shape]

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Returns a tensor in `dtype`. Called from several threads at once."""
        ...


def as_dtype(dtype: Any) -> np.dtype:
    """Returns the numpy dtype for "bfloat16" or "float32", or for the dtypes themselves.

    Raises:
      InputError: any other.
    """
    import jax.numpy as jnp

    names = {"bfloat16": np.dtype(jnp.bfloat16), "float32": np.dtype(np.float32)}
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if name not in names:
        raise InputError(f"expected the dtype bfloat16 or float32, got {name}")
    return names[name]


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return ", ".join(names[:_NUM_NAMED]) + more


def _is_buffer(name: str) -> bool:
    return name.endswith("rotary_emb.inv_freq")


def _check_tied_head(config: LlamaConfig, source: TensorSource) -> bool:
    """Whether the source ships the embedding a second time, as a head; it must be the same."""
    if not (config.tie_embeddings and _HEAD in source.shapes and _EMBEDDING in source.shapes):
        return False
    float32 = np.dtype(np.float32)
    if source.shapes[_HEAD] != source.shapes[_EMBEDDING] or not np.array_equal(
        source.read(_HEAD, float32), source.read(_EMBEDDING, float32)
    ):
        raise InputError(
            f"{source.where}: the config ties head and embedding, but {_HEAD} differs from "
            f"{_EMBEDDING}"
        )
    return True


def check_tensors(config: LlamaConfig, source: TensorSource) -> None:
    """Checks that the source holds the model's tensors, each in its shape, and no others.

    Raises:
      InputError: names what is missing, unknown or of another shape.
    """
    expected = {part.name: part.shape for rule in make_rules(config) for part in rule.parts}
    missing = expected.keys() - source.shapes.keys()
    unknown = {name for name in source.shapes.keys() - expected.keys() if not _is_buffer(name)}
    if _check_tied_head(config, source):
        unknown.discard(_HEAD)
    problems = []
    if missing:
        problems.append(f"missing tensors: {_listed(missing)}")
    if unknown:
        problems.append(f"unknown tensors: {_listed(unknown)}")
    wrong = [
        f"{name}: expected shape {list(shape)}, found {list(source.shapes[name])}"
        for name, shape in expected.items()
        if name in source.shapes and source.shapes[name] != shape
    ]
    if len(wrong) > _NUM_NAMED:
        wrong[_NUM_NAMED:] = [f"{len(wrong) - _NUM_NAMED} more of another shape"]
    problems += wrong
    if problems:
        raise InputError(f"{source.where}: {'; '.join(problems)}")


def load_params(
    config: LlamaConfig, source: TensorSource, dtype: Any, quantization: str | None = None
) -> dict[str, Any]:
    """Reads a checkpoint into parameters on the default device.

    Tensors are read one by one, a few at a time in threads, each already in the final dtype: the
    whole model is never held twice. Kernels to be quantised are read in float32, so that they are
    rounded once.

    Args:
      config: the model.
      source: the open checkpoint.
      dtype: bfloat16 or float32.
      quantization: of the kernels; see `quantize.KINDS`.

    Returns:
      The nested dict of `rules.make_rules`.

    Raises:
      InputError: see `check_tensors`, `quantize.check_kind` and `check_room`.
    """
    import jax

    check_tensors(config, source)
    check_kind(config, quantization)
    dtype, float32 = as_dtype(dtype), np.dtype(np.float32)
    check_room(config, dtype, quantization)

    def load(rule: Rule) -> Any:
        kind = quantization if is_quantizable(rule) else None
        read_as = dtype if kind is None else float32
        tensors = {part.name: source.read(part.name, read_as) for part in rule.parts}
        leaf = jax.device_put(rule.pack(tensors, read_as))
        return leaf if kind is None else quantize(leaf, rule.path, kind, dtype)

    rules = make_rules(config)
    with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        arrays = list(pool.map(load, rules))
    return nest({rule.path: array for rule, array in zip(rules, arrays, strict=True)})


def check_params(config: LlamaConfig, params: dict[str, Any]) -> None:
    """Checks that a tree holds exactly the model's parameters.

    Raises:
      ValueError: names what is missing, unknown or of another shape.
    """
    expected = {rule.path: rule.shape for rule in make_rules(config)}
    found = {path: tuple(leaf.shape) for path, leaf in flatten(params).items()}
    problems = [
        f"{'/'.join(path)}: expected {expected.get(path)}, found {found.get(path)}"
        for path in sorted(expected.keys() | found.keys())
        if expected.get(path) != found.get(path)
    ]
    if problems:
        raise ValueError("parameters do not fit the config: " + "; ".join(problems[:_NUM_NAMED]))


def iterate_tensors(
    config: LlamaConfig, params: dict[str, Any]
) -> Iterator[tuple[Part, np.ndarray]]:
    """Yields every Hugging Face tensor of a parameter tree, one parameter on the host at a time.

    Raises:
      ValueError: see `check_params`.
    """
    check_params(config, params)
    leaves = flatten(params)
    for rule in make_rules(config):
        tensors = rule.unpack(np.asarray(leaves[rule.path]))
        for part in rule.parts:
            yield part, tensors.pop(part.name)

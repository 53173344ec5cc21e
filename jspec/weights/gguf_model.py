"""Config and parameters of GGUF files (llama.cpp's format)."""

import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from jspec.common.typing import Params
from jspec.models.config import DecoderConfig
from jspec.models.families import FAMILIES
from jspec.models.families.gguf_form import GgufForm
from jspec.weights.assemble import TensorSource, check_counts, load_params
from jspec.weights.gguf_config import CONFIG_TENSORS, read_gguf_config
from jspec.weights.gguf_file import GgufFile, GgufTensor
from jspec.weights.packed_weights import PackedSource, PackedTensor
from jspec.weights.tensor_names import parameter_table

_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")  # of all experts in one, [e o i]


def load_gguf(
    path: pathlib.Path, dtype: Any, quantization: str | None = None
) -> tuple[DecoderConfig, Params, GgufFile]:
    """Returns the config and the parameters of a GGUF file, and the open file.

    With the quantization "packed" the weights stay as they are in the file. With "q4_0" those stay
    that it would not make smaller. For "int8" and "int4" they are quantised again, from float32,
    which loses at most another half step. Where the blocks of a row of Q8_0 share one scale and its
    largest weight is 127 steps, int8 gives the same integers.

    Raises:
      InputError: a file that is damaged, of another architecture, or more than jspec can honour.
    """
    file = GgufFile(path)
    config, form = read_gguf_config(file)
    return config, load_params(config, _open(file, config, form), dtype, quantization), file


def _open(file: GgufFile, config: DecoderConfig, form: GgufForm) -> TensorSource:
    """Returns a GGUF file as a source of Hugging Face tensors; unknown ones keep their names."""
    if form.has_experts:
        _split_experts(file)
    check_counts(str(file.path), config, len(file.tensors))
    names = {name: name for name in file.tensors.keys() - CONFIG_TENSORS}
    wanted = {part.name: part.offset for entry in parameter_table(config) for part in entry.parts}
    for name, own in _own_names(config, form, wanted):
        if own in names:
            names[name] = names.pop(own)

    def is_permuted(name: str) -> bool:
        return form.is_permuted and (".q_proj." in name or ".k_proj." in name)

    def read(name: str, dtype: np.dtype) -> np.ndarray:
        # llama.cpp keeps the whole weight of a norm, Hugging Face what is left without the offset.
        if offset := wanted.get(name):
            return (file.read(names[name], np.dtype(np.float32)) - np.float32(offset)).astype(dtype)
        tensor = file.read(names[name], dtype)
        return _unpermute(tensor, config.head_dim) if is_permuted(name) else tensor

    def find(name: str) -> PackedTensor:
        shape, kind, blocks = file.tensors[names[name]]
        order = np.arange(shape[0])
        if is_permuted(name):
            order = _unpermute(order, config.head_dim)
        return PackedTensor(kind.name.lower(), blocks.reshape(len(order), -1), order)

    shapes = {name: file.tensors[own].shape for name, own in names.items()}
    packed = PackedSource(find, file.release)
    return TensorSource(str(file.path), shapes, read, packed)


def _own_names(
    config: DecoderConfig, form: GgufForm, names: Iterable[str]
) -> Iterable[tuple[str, str | None]]:
    """Returns Hugging Face tensors' names and llama.cpp's."""
    import gguf

    architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(architectures[form.architecture], config.num_layers)
    products = (FAMILIES[config.family].sparse_names or ())[1:]
    for name in names:
        if ".experts." not in name:
            yield name, table.get_name(name, try_suffixes=(".weight", ".bias"))
            continue
        # model.layers.3.mlp.experts.5.up_proj.weight
        layer, number, product = (name.split(".")[i] for i in (2, 5, 6))
        own = _EXPERTS[products.index(product)]
        yield name, f"blk.{layer}.{own}.{number}.weight"


def _split_experts(file: GgufFile) -> None:
    """Replaces each tensor of all experts by a view of every expert's part."""
    fused = [name for name in file.tensors if name.rpartition(".")[0].endswith(_EXPERTS)]
    # One of another shape stays, and is refused as unknown.
    for name in [name for name in fused if len(file.tensors[name].shape) == 3]:
        shape, kind, blocks = file.tensors.pop(name)
        stem, _, end = name.rpartition(".")
        for number, part in enumerate(blocks.reshape(shape[0], -1, blocks.shape[1])):
            file.tensors[f"{stem}.{number}.{end}"] = GgufTensor(shape[1:], kind, part)


def _unpermute(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Returns query or key rows, [heads·H, D] or [heads·H], in Hugging Face's order in each head.

    llama.cpp rotates neighbours (2i, 2i+1), Hugging Face the halves (i, i + H/2). Its converter
    interleaves the two halves of every head, and this function undoes it.
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)

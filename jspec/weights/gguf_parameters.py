"""Parameters from GGUF Llama files (llama.cpp's format)."""

import pathlib
from typing import Any

import numpy as np

from jspec.models.config import LlamaConfig
from jspec.weights.assemble import TensorSource, load_params, parse_config
from jspec.weights.gguf.config_json import gguf_config
from jspec.weights.gguf.reader import GgufFile
from jspec.weights.tensor_names import parameter_table

_ROPE_FACTORS = "rope_freqs.weight"  # read with the config


def unpermute(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Returns query or key rows in Hugging Face's order within each head.

    llama.cpp rotates neighbours (2i, 2i+1), Hugging Face the halves (i, i + H/2). Its converter
    interleaves the two halves of every head, and this function undoes it.

    Args:
      rows: a weight [heads·H, D] or bias [heads·H].
      head_dim: H.
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def open_gguf(file: GgufFile, config: LlamaConfig) -> TensorSource:
    """Returns a GGUF file as a source of Hugging Face tensors; unknown ones keep their names."""
    import gguf

    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    names = {name: name for name in file.tensors.keys() - {_ROPE_FACTORS}}
    for part in (part for entry in parameter_table(config) for part in entry.parts):
        own = table.get_name(part.name, try_suffixes=(".weight", ".bias"))
        if own in names:
            names[part.name] = names.pop(own)

    def read(name: str, dtype: np.dtype) -> np.ndarray:
        tensor = file.read(names[name], dtype)
        is_rotated = ".q_proj." in name or ".k_proj." in name
        return unpermute(tensor, config.head_dim) if is_rotated else tensor

    shapes = {name: file.tensors[own].shape for name, own in names.items()}
    return TensorSource(str(file.path), shapes, read)


def load_gguf(
    path: pathlib.Path, dtype: Any, quantization: str | None = None
) -> tuple[LlamaConfig, dict[str, Any], GgufFile]:
    """Returns the config and the parameters of a GGUF Llama, and the open file.

    The file's own quantisation does not carry over: XLA has no fast product for its blocks of 32
    weights with float16 scales. The weights, in float32, are quantised again, which loses at most
    another half step. Where the blocks of a row of Q8_0 share one scale and its largest weight is
    127 steps, int8 gives the same integers.

    Args:
      path: the file.
      dtype: bfloat16 or float32.
      quantization: of the kernels; see `quantize.KINDS`.

    Raises:
      InputError: a damaged file, another architecture, or tensors that do not fit.
    """
    file = GgufFile(path)
    config = parse_config(gguf_config(file), path)
    return config, load_params(config, open_gguf(file, config), dtype, quantization), file

"""Parameters from GGUF Llama files (llama.cpp's format)."""

import pathlib
import re
from typing import Any

import numpy as np

from jspec.models.config import LlamaConfig
from jspec.weights.assemble import load_params
from jspec.weights.gguf.config import read_config
from jspec.weights.gguf.reader import GgufFile
from jspec.weights.rules import Shape

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# The RoPE scaling: read with the config.
_READ_ELSEWHERE = frozenset({"rope_freqs.weight"})


def hf_name(name: str) -> str:
    """Returns Hugging Face's name of a GGUF tensor; a stranger keeps its own."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{kind}"
    return name


def unpermute(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Returns query or key rows in Hugging Face's order within each head.

    llama.cpp rotates neighbours (2i, 2i+1), Hugging Face the halves (i, i + H/2): its converter
    interleaves the two halves of every head, and this undoes it.

    Args:
      rows: a weight [heads·H, D] or bias [heads·H].
      head_dim: H.
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


class GgufSource:
    """A GGUF file as a source of Hugging Face tensors (see `assemble.TensorSource`)."""

    def __init__(self, file: GgufFile, config: LlamaConfig) -> None:
        self.where = str(file.path)
        self._file = file
        self._head_dim = config.head_dim
        self._names = {hf_name(name): name for name in file.tensors.keys() - _READ_ELSEWHERE}
        self.shapes: dict[str, Shape] = {
            name: file.tensors[own].shape for name, own in self._names.items()
        }

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Returns a tensor in `dtype`, query and key rows in Hugging Face's order."""
        tensor = self._file.read(self._names[name], dtype)
        if ".q_proj." in name or ".k_proj." in name:
            return unpermute(tensor, self._head_dim)
        return tensor


def load_gguf(
    path: pathlib.Path, dtype: Any, quantization: str | None = None
) -> tuple[LlamaConfig, dict[str, Any], GgufFile]:
    """Loads a GGUF Llama.

    The file's own quantisation does not carry over: its blocks of 32 weights have float16 scales
    of their own, for which XLA has no fast product. Its weights, in float32, are quantised anew,
    which loses at most half a step once more; where the blocks of a row of Q8_0 share one scale,
    and its largest weight is 127 steps, int8 gives the very same integers.

    Args:
      path: the file.
      dtype: bfloat16 or float32.
      quantization: of the kernels; see `quantize.KINDS`.

    Returns:
      The config, the parameters, and the open file (for `gguf_tokenizer.build_tokenizer`).

    Raises:
      InputError: a damaged file, another architecture, or tensors that do not fit.
    """
    file = GgufFile(path)
    config = read_config(file)
    return config, load_params(config, GgufSource(file, config), dtype, quantization), file

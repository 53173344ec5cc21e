"""Config and parameters of GGUF Llama files (llama.cpp's format)."""

import dataclasses
import pathlib
from typing import Any

import numpy as np

from jspec.common.errors import InputError
from jspec.common.typing import Params
from jspec.models.config import DecoderConfig, RopeScaling
from jspec.models.rope import rope_frequencies
from jspec.weights.assemble import TensorSource, load_params
from jspec.weights.gguf_file import GgufFile
from jspec.weights.packed_weights import PackedSource, PackedTensor
from jspec.weights.tensor_names import parameter_table

_ROPE_FACTORS = "rope_freqs.weight"  # read with the config
# Keys under `llama.` that are read, or that change nothing that jspec computes.
_KNOWN_KEYS = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon",
    "attention.key_length", "attention.value_length", "rope.freq_base", "rope.dimension_count",
})  # fmt: skip
# Keys that would change the computation, and the only values that jspec honours.
_REQUIRED_VALUES = {
    "rope.scaling.type": "none", "rope.scaling.factor": 1.0, "rope.scale_linear": 1.0,
    "expert_count": 0, "expert_used_count": 0, "attention.causal": True,
}  # fmt: skip


def load_gguf(
    path: pathlib.Path, dtype: Any, quantization: str | None = None
) -> tuple[DecoderConfig, Params, GgufFile]:
    """Returns the config and the parameters of a GGUF Llama, and the open file.

    With the quantization "packed" the weights stay as they are in the file. For "int8" and "int4"
    they are quantised again, from float32, which loses at most another half step. Where the blocks
    of a row of Q8_0 share one scale and its largest weight is 127 steps, int8 gives the same
    integers.

    Raises:
      InputError: a file that is damaged, of another architecture, or more than jspec can honour.
    """
    file = GgufFile(path)
    try:
        config = _read_config(file)
        if _ROPE_FACTORS in file.tensors:
            config = _with_rope_scaling(config, file.read(_ROPE_FACTORS, np.dtype(np.float32)))
    except InputError:  # names the path already
        raise
    except KeyError as error:
        raise InputError(f"{path}: the file lacks {error}") from None
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise InputError(f"{path}: {error}") from None
    return config, load_params(config, _open(file, config), dtype, quantization), file


def _shortest(value: float) -> float:
    """Returns the shortest decimal that is this float32: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _read_config(file: GgufFile) -> DecoderConfig:
    raw = _read_keys(file)
    num_heads = raw["attention.head_count"]
    head_dim = raw.get("attention.key_length", raw["embedding_length"] // num_heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if raw.get(key, head_dim) != head_dim:
            raise ValueError(f"expected llama.{key} to be {head_dim}, got {raw[key]}")
    return DecoderConfig(
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        embed_dim=raw["embedding_length"],
        hidden_dim=raw["feed_forward_length"],
        num_layers=raw["block_count"],
        num_heads=num_heads,
        num_kv_heads=raw.get("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_seq_len=raw["context_length"],
        rope_theta=_shortest(raw.get("rope.freq_base", 10_000.0)),
        norm_epsilon=_shortest(raw["attention.layer_norm_rms_epsilon"]),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        bos_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
    )


def _read_keys(file: GgufFile) -> dict[str, Any]:
    """Returns the metadata under `llama.`; every key is known or has the only value honoured."""
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"expected the architecture 'llama', got {architecture!r}")
    own = [key for key in file.metadata if key.startswith("llama.")]
    raw = {key.removeprefix("llama."): file.metadata[key] for key in own}
    for key, value in _REQUIRED_VALUES.items():
        if (found := raw.pop(key, value)) != value:
            raise ValueError(f"expected llama.{key} to be {value!r}, got {found!r}")
    if strangers := sorted(raw.keys() - _KNOWN_KEYS):
        raise ValueError(f"unknown keys llama.{', llama.'.join(strangers)}")
    for key, value in raw.items():
        if isinstance(value, list):  # one for each layer
            if len(set(value)) != 1:
                raise ValueError(f"llama.{key} differs between layers, got {value}")
            raw[key] = value[0]
    return raw


def _with_rope_scaling(config: DecoderConfig, factors: np.ndarray) -> DecoderConfig:
    """Recognises Llama 3's scaling by its effect on each frequency, all that a file holds of it."""
    if np.all(factors == 1):
        return config
    # The lowest frequency is divided by the whole factor; the other values are always the same.
    scaled = dataclasses.replace(config, rope_scaling=RopeScaling(_shortest(factors.max())))
    expected = rope_frequencies(config) / rope_frequencies(scaled)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4, atol=0):
        raise ValueError(f"expected {_ROPE_FACTORS} to hold Llama 3's scaling, got other factors")
    return scaled


def _open(file: GgufFile, config: DecoderConfig) -> TensorSource:
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
        return _unpermute(tensor, config.head_dim) if _is_rotated(name) else tensor

    def find(name: str) -> PackedTensor:
        shape, kind, blocks = file.tensors[names[name]]
        order = np.arange(shape[0])
        if _is_rotated(name):
            order = _unpermute(order, config.head_dim)
        return PackedTensor(kind.name.lower(), blocks.reshape(len(order), -1), order)

    shapes = {name: file.tensors[own].shape for name, own in names.items()}
    packed = PackedSource(find, file.release)
    return TensorSource(str(file.path), shapes, read, packed)


def _is_rotated(name: str) -> bool:
    return ".q_proj." in name or ".k_proj." in name


def _unpermute(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Returns query or key rows, [heads·H, D] or [heads·H], in Hugging Face's order in each head.

    llama.cpp rotates neighbours (2i, 2i+1), Hugging Face the halves (i, i + H/2). Its converter
    interleaves the two halves of every head, and this function undoes it.
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)

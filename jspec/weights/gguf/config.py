"""LlamaConfig from the metadata of a GGUF file."""

from typing import Any

import numpy as np

from jspec.common.errors import InputError
from jspec.models.config import LlamaConfig, RopeScaling
from jspec.weights.gguf.reader import GgufFile

# Keys under `llama.` that are read, or change nothing that jspec computes.
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


def _shortest(value: float) -> float:
    """Returns the shortest decimal that is this float32: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _uniform(file: GgufFile, key: str, value: Any) -> Any:
    """Returns a number that the file may give once for each layer."""
    values = set(value) if isinstance(value, list) else {value}
    if len(values) != 1:
        raise InputError(f"{file.path}: llama.{key} differs between layers, got {value}")
    return values.pop()


def rope_factors(scaling: RopeScaling, head_dim: int, rope_theta: float) -> np.ndarray:
    """Returns what Llama 3's scaling divides each rotary frequency by, float64 [H/2]."""
    frequencies = rope_theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = scaling.original_max_seq_len * frequencies / (2 * np.pi)
    smooth = (turns - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = np.clip(smooth, 0.0, 1.0)
    return 1 / ((1 - smooth) / scaling.factor + smooth)


def _read_rope_scaling(file: GgufFile, head_dim: int, theta: float) -> RopeScaling | None:
    """Recognises the scaling behind the precomputed factors that Llama 3.x files carry."""
    if "rope_freqs.weight" not in file.tensors:
        return None
    factors = file.read("rope_freqs.weight", np.dtype(np.float32))
    if np.all(factors == 1):
        return None
    if factors.shape == (head_dim // 2,):
        # The lowest frequency is divided by the whole factor (8 for Llama 3.1, 32 for 3.2).
        scaling = RopeScaling(factor=_shortest(factors.max()))
        if np.allclose(rope_factors(scaling, head_dim, theta), factors, rtol=1e-4, atol=0):
            return scaling
    raise InputError(
        f"{file.path}: expected rope_freqs.weight to hold Llama 3's scaling (low 1, high 4, "
        "original context 8192), got other factors"
    )


def _check_keys(file: GgufFile) -> dict[str, Any]:
    """Returns the metadata under `llama.`, every key accounted for."""
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise InputError(f"{file.path}: expected the architecture 'llama', got {architecture!r}")
    raw = {
        key.removeprefix("llama."): value
        for key, value in file.metadata.items()
        if key.startswith("llama.")
    }
    for key, value in _REQUIRED_VALUES.items():
        if raw.pop(key, value) != value:
            found = file.metadata[f"llama.{key}"]
            raise InputError(f"{file.path}: expected llama.{key} to be {value!r}, got {found!r}")
    strangers = sorted(raw.keys() - _KNOWN_KEYS)
    if strangers:
        raise InputError(f"{file.path}: unknown keys llama.{', llama.'.join(strangers)}")
    return raw


def _special_ids(file: GgufFile) -> dict[str, Any]:
    """Returns the ids that begin and end a text, the end of a turn included."""
    ids = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return {
        "bos_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_ids": tuple(dict.fromkeys(i for i in ids if i is not None)),
    }


def read_config(file: GgufFile) -> LlamaConfig:
    """Reads the config of a GGUF Llama.

    Raises:
      InputError: another architecture, a missing or unknown key, or a value that jspec cannot
        honour; names the file and the key.
    """
    raw = _check_keys(file)
    try:
        embed_dim = raw["embedding_length"]
        num_heads = _uniform(file, "attention.head_count", raw["attention.head_count"])
        head_dim = raw.get("attention.key_length", embed_dim // num_heads)
        theta = _shortest(raw.get("rope.freq_base", 10_000.0))
        for key in ("rope.dimension_count", "attention.value_length"):
            if raw.get(key, head_dim) != head_dim:
                raise ValueError(f"expected llama.{key} to be {head_dim}, got {raw[key]}")
        kv_heads = raw.get("attention.head_count_kv", num_heads)
        return LlamaConfig(
            vocab_size=file.tensors["token_embd.weight"].shape[0],
            embed_dim=embed_dim,
            hidden_dim=_uniform(file, "feed_forward_length", raw["feed_forward_length"]),
            num_layers=raw["block_count"],
            num_heads=num_heads,
            num_kv_heads=_uniform(file, "attention.head_count_kv", kv_heads),
            head_dim=head_dim,
            max_seq_len=raw["context_length"],
            rope_theta=theta,
            rope_scaling=_read_rope_scaling(file, head_dim, theta),
            norm_epsilon=_shortest(raw["attention.layer_norm_rms_epsilon"]),
            tie_embeddings="output.weight" not in file.tensors,
            attention_bias="blk.0.attn_q.bias" in file.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
            **_special_ids(file),
        )
    except InputError:
        raise
    except KeyError as error:
        raise InputError(f"{file.path}: the file lacks {error}") from None
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise InputError(f"{file.path}: {error}") from None

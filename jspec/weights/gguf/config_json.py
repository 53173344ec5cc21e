"""The content of a config.json, in Hugging Face's spelling, from the metadata of a GGUF file."""

from typing import Any

import numpy as np

from jspec.common.errors import InputError
from jspec.weights.gguf.reader import GgufFile

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
# Llama 3.x's own values; a GGUF file holds only their effect on each frequency.
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _shortest(value: float) -> float:
    """Returns the shortest decimal that is this float32: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _uniform(key: str, value: Any) -> Any:
    """Returns a number that the file may give once for each layer."""
    values = set(value) if isinstance(value, list) else {value}
    if len(values) != 1:
        raise ValueError(f"llama.{key} differs between layers, got {value}")
    return values.pop()


def rope_factors(factor: float, head_dim: int, rope_theta: float) -> np.ndarray:
    """Returns what Llama 3's scaling divides each rotary frequency by, float64 [H/2].

    Args:
      factor: what the lowest frequencies are divided by (8 for Llama 3.1, 32 for 3.2).
      head_dim: H.
      rope_theta: base of the rotary frequencies.
    """
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    frequencies = rope_theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - smooth) / factor + smooth)


def _rope_parameters(file: GgufFile, head_dim: int, theta: float) -> dict[str, Any]:
    """Recognises Llama 3's scaling in the precomputed factors that its files carry."""
    rope = {"rope_theta": theta}
    if "rope_freqs.weight" not in file.tensors:
        return rope
    factors = file.read("rope_freqs.weight", np.dtype(np.float32))
    if np.all(factors == 1):
        return rope
    if factors.shape == (head_dim // 2,):
        factor = _shortest(factors.max())  # the lowest frequency is divided by the whole factor
        if np.allclose(rope_factors(factor, head_dim, theta), factors, rtol=1e-4, atol=0):
            return rope | _LLAMA3 | {"factor": factor}
    raise ValueError(
        "expected rope_freqs.weight to hold Llama 3's scaling (low 1, high 4, original context "
        "8192), got other factors"
    )


def _read_keys(file: GgufFile) -> dict[str, Any]:
    """Returns the metadata under `llama.`; every key is known or has the only value honoured."""
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"expected the architecture 'llama', got {architecture!r}")
    raw = {
        key.removeprefix("llama."): value
        for key, value in file.metadata.items()
        if key.startswith("llama.")
    }
    for key, value in _REQUIRED_VALUES.items():
        if (found := raw.pop(key, value)) != value:
            raise ValueError(f"expected llama.{key} to be {value!r}, got {found!r}")
    if strangers := sorted(raw.keys() - _KNOWN_KEYS):
        raise ValueError(f"unknown keys llama.{', llama.'.join(strangers)}")
    return raw


def _config(file: GgufFile) -> dict[str, Any]:
    raw = _read_keys(file)
    num_heads = _uniform("attention.head_count", raw["attention.head_count"])
    head_dim = raw.get("attention.key_length", raw["embedding_length"] // num_heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if raw.get(key, head_dim) != head_dim:
            raise ValueError(f"expected llama.{key} to be {head_dim}, got {raw[key]}")
    kv_heads = raw.get("attention.head_count_kv", num_heads)
    theta = _shortest(raw.get("rope.freq_base", 10_000.0))
    ids = {key: file.metadata.get(f"tokenizer.ggml.{key}_token_id")
           for key in ("bos", "eos", "eot", "eom")}  # fmt: skip
    ends = (ids["eos"], ids["eot"], ids["eom"])  # of the text, and of a turn
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": raw["embedding_length"],
        "intermediate_size": _uniform("feed_forward_length", raw["feed_forward_length"]),
        "num_hidden_layers": raw["block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": _uniform("attention.head_count_kv", kv_heads),
        "head_dim": head_dim,
        "max_position_embeddings": raw["context_length"],
        "rope_parameters": _rope_parameters(file, head_dim, theta),
        "rms_norm_eps": _shortest(raw["attention.layer_norm_rms_epsilon"]),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "bos_token_id": ids["bos"],
        "eos_token_id": list(dict.fromkeys(i for i in ends if i is not None)),
    }


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Returns the config of a GGUF Llama, as its config.json would hold it.

    Raises:
      InputError: another architecture, a missing or unknown key, or a value that jspec cannot
        honour; the message names the file and the key.
    """
    try:
        return _config(file)
    except KeyError as error:
        raise InputError(f"{file.path}: the file lacks {error}") from None
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise InputError(f"{file.path}: {error}") from None

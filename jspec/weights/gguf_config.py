"""The config in a GGUF file's metadata, read as the config.json that its model came from.

Keys stand under the architecture's name (`qwen2.block_count`) and are the same for all; what a
family has besides is said beside it, in `models.families`. A key that is not known is an error.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from jspec.common.errors import InputError
from jspec.models.config import DecoderConfig, RopeScaling
from jspec.models.families import find_gguf_family
from jspec.models.families.gguf_form import GgufForm
from jspec.models.families.hf_config import from_hf_config
from jspec.models.rope import rope_frequencies
from jspec.weights.gguf_file import GgufFile

_FACTORS = "rope_freqs.weight"  # of llama3: the divisor of each frequency
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"  # of longrope
CONFIG_TENSORS = frozenset({_FACTORS, _LONG, _SHORT})
_EPSILON = "attention.layer_norm_rms_epsilon"
# Keys of every architecture, and the keys of config.json that they become.
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    _EPSILON: "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_SIZES = (
    "block_count", "context_length", "embedding_length", "feed_forward_length",
    "attention.head_count",
)  # fmt: skip
_SAME_AS_HEAD_DIM = ("attention.value_length", "rope.dimension_count")
# The output matrix tells the size of the vocabulary; the other says how a model was made.
_IGNORED = frozenset({"vocab_size", "rope.scaling.finetuned"})
# Keys that would change the computation, and the only values that jspec honours.
_REQUIRED_VALUES = {"attention.causal": True, "rope.scaling.yarn_ext_factor": 1.0}
_MAX_EXPERTS = 1024
_SCALING = "rope.scaling."
_ATTENTION_FACTORS = ("attn_factor", "yarn_attn_factor")  # their product counts
_SCALING_KEYS = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def read_gguf_config(file: GgufFile) -> tuple[DecoderConfig, GgufForm]:
    """Returns a file's config, and how llama.cpp writes models of its family.

    Raises:
      InputError: an unknown architecture, a missing or unknown key, or a value that jspec cannot
        honour; the message names it.
    """
    try:
        return _read(file)
    except InputError:  # names the path already
        raise
    except KeyError as error:
        raise InputError(f"{file.path}: the file lacks {error}") from None
    except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
        raise InputError(f"{file.path}: {error}") from None


def _read(file: GgufFile) -> tuple[DecoderConfig, GgufForm]:
    architecture = file.metadata.get("general.architecture")
    own = _own_keys(file, f"{architecture}.")
    family, form = find_gguf_family(architecture, bool(own.get("expert_count")))
    if missing := [key for key in (*_SIZES, _EPSILON) if key not in own]:
        raise KeyError(f"{architecture}.{missing[0]}")
    for key in _SIZES:
        if not isinstance(own[key], int) or own[key] < 1:
            least = "a whole number of at least 1"
            raise ValueError(f"expected {architecture}.{key} to be {least}, got {own[key]!r}")
    if not form.has_experts:  # some converters write zeros
        own = {key: own[key] for key in own if key not in ("expert_count", "expert_used_count")}
    # A damaged number of layers or experts would be listed one by one, for hours.
    for key in ("block_count", "expert_count"):
        if (count := own.get(key, 0)) > (limit := max(len(file.tensors), _MAX_EXPERTS)):
            raise ValueError(f"expected {architecture}.{key} to be at most {limit}, got {count}")
    scaling = _take_scaling(file, own)
    known = {**_KEYS, **form.keys}
    raw = {known[key]: own.pop(key) for key in known if key in own}
    raw.setdefault("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    for key in _SAME_AS_HEAD_DIM:
        if (found := own.pop(key, raw["head_dim"])) != raw["head_dim"]:
            raise ValueError(f"expected {architecture}.{key} to be {raw['head_dim']}, got {found}")
    if strangers := sorted(f"{architecture}.{key}" for key in own.keys() - _IGNORED):
        raise ValueError(f"unknown keys {', '.join(strangers)}")
    raw.setdefault("rope_theta", 10_000.0)
    raw.setdefault("num_key_value_heads", raw["num_attention_heads"])
    raw |= form.complete(raw) | _from_tensors(file, family.keys)
    raw |= {"model_type": family.model_type} | ({"rope_scaling": scaling} if scaling else {})
    raw["bos_token_id"] = file.metadata.get("tokenizer.ggml.bos_token_id")
    raw["eos_token_id"] = None  # the tokenizer knows the ends
    config = from_hf_config(raw)
    if _FACTORS in file.tensors:
        config = _with_llama3_scaling(config, file.read(_FACTORS, np.dtype(np.float32)))
    return config, form


def _own_keys(file: GgufFile, prefix: str) -> dict[str, Any]:
    """Returns the metadata under the architecture's name, checked as far as it can be alone."""
    found = {key: file.metadata[key] for key in file.metadata if key.startswith(prefix)}
    raw = {key.removeprefix(prefix): value for key, value in found.items()}
    for key, value in raw.items():
        if isinstance(value, float):
            raw[key] = _shortest(value)
        elif isinstance(value, list) and not key.endswith("sliding_window_pattern"):
            if len(set(value)) != 1:  # one for each layer
                raise ValueError(f"{prefix}{key} differs between layers, got {value}")
            raw[key] = value[0]
    for key, value in _REQUIRED_VALUES.items():
        if (got := raw.pop(key, value)) != value:
            raise ValueError(f"expected {prefix}{key} to be {value!r}, got {got!r}")
    return raw


def _shortest(value: float) -> float:
    """Returns the shortest decimal that is this float32: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _take_scaling(file: GgufFile, own: dict[str, Any]) -> dict[str, Any] | None:
    """Takes the RoPE settings out of the keys; returns config.json's, None for no scaling."""
    keys = [key for key in own if key.removeprefix(_SCALING) in _SCALING_KEYS]
    settings = {_SCALING_KEYS[key.removeprefix(_SCALING)]: own.pop(key) for key in keys}
    attention = math.prod(own.pop(_SCALING + key, 1.0) for key in _ATTENTION_FACTORS)
    linear = own.pop("rope.scale_linear", 1.0)  # of early files
    if _SHORT in file.tensors:  # llama.cpp's converter of Phi-3 names no type
        factors = {"short_factor": file.read(_SHORT, np.dtype(np.float32)),
                   "long_factor": file.read(_LONG, np.dtype(np.float32))}  # fmt: skip
        lists = {key: [_shortest(factor) for factor in factors[key].ravel()] for key in factors}
        own_attention = {} if attention == 1.0 else {"attention_factor": attention}
        return settings | own_attention | {"rope_type": "longrope"} | lists
    kind = settings.get("rope_type", "none" if linear == 1.0 else "linear")
    if attention != 1.0 and kind != "yarn":
        raise ValueError(f"expected {_SCALING}attn_factor to be 1.0 here, got {attention}")
    if kind == "none":
        return None
    if linear != 1.0:
        settings["factor"] = linear
    if "factor" not in settings:
        raise KeyError(f"{_SCALING}factor")
    if attention != 1.0:  # llama.cpp multiplies yarn's own by it
        own_factor = 1.0 + 0.1 * math.log(max(settings["factor"], 1.0))
        settings["attention_factor"] = attention * own_factor
    return settings | {"rope_type": kind}


def _from_tensors(file: GgufFile, keys: Any) -> dict[str, Any]:
    """Returns the keys of config.json that a file says by the tensors that it holds."""
    raw = {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    biases = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"}
    return raw | {key: name in file.tensors for key, name in biases.items() if key in keys}


def _with_llama3_scaling(config: DecoderConfig, factors: np.ndarray) -> DecoderConfig:
    """Recognises Llama 3's scaling by its effect on each frequency, all that a file holds of it."""
    if np.all(factors == 1):
        return config
    # The lowest frequency is divided by the whole factor; the other values are always the same.
    scaled = dataclasses.replace(config, rope_scaling=RopeScaling(_shortest(factors.max())))
    expected = rope_frequencies(config) / rope_frequencies(scaled)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4, atol=0):
        raise ValueError(f"expected {_FACTORS} to hold Llama 3's scaling, got other factors")
    return scaled

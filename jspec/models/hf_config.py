"""Reads Hugging Face's config.json as a `LlamaConfig`, and writes it again."""

from collections.abc import Mapping
from typing import Any

from jspec.models.config import LlamaConfig, RopeScaling

# Keys of config.json that change nothing that jspec computes.
_IGNORED_KEYS = frozenset({
    "_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout",
    "chunk_size_feed_forward", "dtype", "id2label", "initializer_range", "label2id",
    "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict",
    "torch_dtype", "transformers_version", "transformers.js_config", "use_cache", "unsloth_fixed",
})  # fmt: skip

# Keys that would change the computation, and the only values that jspec honours.
_REQUIRED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "pretraining_tp": (1, None),
    "is_encoder_decoder": (False,),
    "rope_interleaved": (False,),
    "is_llama_config": (True,),
}


# Keys of checkpoints that others have quantised: transformers', an older one of compressed-tensors,
# and that of MLX.
_QUANTIZATION_KEYS = ("quantization_config", "compression_config", "quantization")


def _refuse_quantized(key: str, quantization: Any) -> None:
    """Refuses weights that another library has quantised, by its name for the method."""
    if quantization is None:
        return
    method = quantization
    if isinstance(quantization, Mapping):
        method = quantization.get("quant_method", "an unnamed method")
    raise ValueError(
        f"expected float weights, got ones quantised by {method} ({key}); take the "
        "original weights, with --draft_quantization=int8 (or, of a target, "
        "--target_quantization=int8) to have them rounded as they are loaded"
    )


def _read_rope(raw: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Takes the RoPE settings out of `raw`, in either spelling, and checks them."""
    parameters = raw.pop("rope_parameters", None)
    scaling = raw.pop("rope_scaling", None)
    if parameters is not None and scaling is not None and parameters != scaling:
        raise ValueError("config has both rope_parameters and rope_scaling, and they differ")
    rope = dict(parameters or scaling or {})
    # Inside the RoPE settings in the newer spelling, beside them in the older one.
    theta = raw.pop("rope_theta", None)
    theta = rope.pop("rope_theta", theta if theta is not None else 10_000.0)
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    if kind == "default":
        scaling_out = None
    elif kind == "llama3":
        try:
            scaling_out = RopeScaling(
                factor=float(rope.pop("factor")),
                low_freq_factor=float(rope.pop("low_freq_factor")),
                high_freq_factor=float(rope.pop("high_freq_factor")),
                original_max_seq_len=int(rope.pop("original_max_position_embeddings")),
            )
        except KeyError as error:
            raise ValueError(f"llama3 rope scaling lacks the key {error}") from None
    else:
        raise ValueError(f"expected rope type 'default' or 'llama3', got {kind!r}")
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("expected partial_rotary_factor 1.0: every head dimension is rotated")
    if rope:
        raise ValueError(f"unknown rope keys: {', '.join(sorted(rope))}")
    return float(theta), scaling_out


def _pop_size(raw: dict[str, Any], key: str) -> int:
    if key not in raw:
        raise ValueError(f"config lacks the key {key!r}")
    value = raw.pop(key)
    if not isinstance(value, int):
        raise ValueError(f"expected {key} to be a whole number, got {value!r}")
    return value


def _as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def from_hf_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """Reads the config.json of any `LlamaForCausalLM`.

    Args:
      raw: the parsed file, RoPE in either spelling (`rope_theta` with `rope_scaling`, or
        `rope_parameters`).

    Returns:
      The config.

    Raises:
      ValueError: another architecture, a missing key, an unknown key, or a value that jspec cannot
        honour; the message names it.
    """
    raw = dict(raw)
    architectures = raw.get("architectures") or ["LlamaForCausalLM"]
    if architectures != ["LlamaForCausalLM"]:
        raise ValueError(f"expected the architecture LlamaForCausalLM, got {architectures}")
    for key, values in _REQUIRED_VALUES.items():
        value = raw.pop(key, values[0])
        if value not in values:
            raise ValueError(f"expected {key} to be {values[0]!r}, got {value!r}")
    for key in _QUANTIZATION_KEYS:
        _refuse_quantized(key, raw.pop(key, None))
    rope_theta, rope_scaling = _read_rope(raw)
    num_heads = _pop_size(raw, "num_attention_heads")
    embed_dim = _pop_size(raw, "hidden_size")
    head_dim = raw.pop("head_dim", None)
    kv_heads = raw.pop("num_key_value_heads", None)
    config = LlamaConfig(
        vocab_size=_pop_size(raw, "vocab_size"),
        embed_dim=embed_dim,
        hidden_dim=_pop_size(raw, "intermediate_size"),
        num_layers=_pop_size(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads if kv_heads is None else kv_heads,
        head_dim=embed_dim // num_heads if head_dim is None else head_dim,
        max_seq_len=raw.pop("max_position_embeddings", 2048),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        norm_epsilon=raw.pop("rms_norm_eps", 1e-6),
        tie_embeddings=raw.pop("tie_word_embeddings", False),
        attention_bias=raw.pop("attention_bias", False),
        mlp_bias=raw.pop("mlp_bias", False),
        bos_id=raw.pop("bos_token_id", None),
        eos_ids=_as_ids(raw.pop("eos_token_id", None)),
    )
    strangers = sorted(set(raw) - _IGNORED_KEYS)
    if strangers:
        raise ValueError(f"unknown config keys: {', '.join(strangers)}")
    return config


def to_hf_config(config: LlamaConfig) -> dict[str, Any]:
    """Returns the config.json contents that `from_hf_config` reads back as the same config."""
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if config.rope_scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_max_seq_len,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_seq_len,
        "rope_parameters": rope,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids),
    }

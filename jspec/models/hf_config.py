"""Reads Hugging Face's config.json as a `DecoderConfig`, and writes it again."""

from collections.abc import Mapping
from typing import Any

from jspec.models.config import DecoderConfig, RopeScaling

# Keys of config.json, and the fields of `DecoderConfig` that they become.
_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "embed_dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_epsilon",
    "tie_word_embeddings": "tie_embeddings",
    "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
    "bos_token_id": "bos_id",
    "eos_token_id": "eos_ids",
}
_ROPE_FIELDS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_seq_len",
}
# What a missing key means; the other keys are sizes, and must be there.
_DEFAULTS = {
    "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip

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


def _refuse_quantized(raw: dict[str, Any]) -> None:
    for key in _QUANTIZATION_KEYS:
        quantization = raw.pop(key, None)
        if quantization is not None:
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
    theta = rope.pop("rope_theta", 10_000.0 if theta is None else theta)
    kind = rope.pop("rope_type", rope.get("type", "default"))
    rope.pop("type", None)
    if kind not in ("default", "llama3"):
        raise ValueError(f"expected rope type 'default' or 'llama3', got {kind!r}")
    scaling = None
    if kind == "llama3":
        missing = [key for key in _ROPE_FIELDS if key not in rope]
        if missing:
            raise ValueError(f"llama3 rope scaling lacks the key {missing[0]!r}")
        numbers = {field: float(rope.pop(key)) for key, field in _ROPE_FIELDS.items()}
        max_seq_len = int(numbers.pop("original_max_seq_len"))
        scaling = RopeScaling(**numbers, original_max_seq_len=max_seq_len)
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("expected partial_rotary_factor 1.0: every head dimension is rotated")
    if rope:
        raise ValueError(f"unknown rope keys: {', '.join(sorted(rope))}")
    return float(theta), scaling


def from_hf_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of any `LlamaForCausalLM`.

    RoPE may have either spelling: `rope_theta` with `rope_scaling`, or `rope_parameters`.

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
    _refuse_quantized(raw)
    rope_theta, rope_scaling = _read_rope(raw)
    for key in [key for key in _FIELDS if key not in _DEFAULTS]:
        if key not in raw:
            raise ValueError(f"config lacks the key {key!r}")
        if not isinstance(raw[key], int):
            raise ValueError(f"expected {key} to be a whole number, got {raw[key]!r}")
    fields = {field: raw.pop(key, _DEFAULTS.get(key)) for key, field in _FIELDS.items()}
    if fields["num_kv_heads"] is None:
        fields["num_kv_heads"] = fields["num_heads"]
    if fields["head_dim"] is None:
        fields["head_dim"] = fields["embed_dim"] // fields["num_heads"]
    eos = fields["eos_ids"]  # one id, a list, or none
    fields["eos_ids"] = (
        tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,)
    )
    config = DecoderConfig(**fields, rope_theta=rope_theta, rope_scaling=rope_scaling)
    strangers = sorted(set(raw) - _IGNORED_KEYS)
    if strangers:
        raise ValueError(f"unknown config keys: {', '.join(strangers)}")
    return config


def to_hf_config(config: DecoderConfig) -> dict[str, Any]:
    """Returns the config.json contents that `from_hf_config` reads back as the same config."""
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if config.rope_scaling is not None:
        scaling = {key: getattr(config.rope_scaling, name) for key, name in _ROPE_FIELDS.items()}
        rope |= {"rope_type": "llama3", **scaling}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rope_parameters": rope,
        **{key: getattr(config, field) for key, field in _FIELDS.items()},
        "eos_token_id": list(config.eos_ids),
    }

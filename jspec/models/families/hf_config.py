"""Reads the config.json of any family as a `DecoderConfig`, and writes it again."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.models.config import DecoderConfig
from jspec.models.families import FAMILIES
from jspec.models.families.family import Family, as_number, check_sizes, read_rope, write_rope

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
    "bos_token_id": "bos_id",
    "eos_token_id": "eos_ids",
}
# What a missing key means; the other keys are sizes, and must be there.
_DEFAULTS = {
    "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip

# Keys of config.json that change nothing that jspec computes.
_IGNORED_KEYS = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
    "_commit_hash", "_experts_implementation", "_name_or_path", "attention_dropout",
    "attn_implementation", "cache_implementation", "chunk_size_feed_forward",
    "decoder_start_token_id", "dtype", "finetuning_task", "gradient_checkpointing", "id2label",
    "initializer_range", "label2id", "output_attentions", "output_hidden_states", "pad_token_id",
    "prefix", "problem_type", "return_dict", "sep_token_id", "task_specific_params",
    "tf_legacy_loss", "tokenizer_class", "torch_dtype", "torchscript", "transformers_version",
    "transformers.js_config", "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
    # How answers are asked for, which older versions of transformers wrote here, too.
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
    "output_scores", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate",
    "suppress_tokens", "temperature", "top_k", "top_p", "typical_p",
})  # fmt: skip

# Keys that would change the computation, and the only values that jspec honours.
_REQUIRED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
    "tie_encoder_decoder": (False,),
}

# What the values of the other keys are, where something is computed from them.
_KINDS: Mapping[str, tuple[str, type]] = {
    "model_type": ("a text", str), "sliding_window": ("a whole number", int),
    **dict.fromkeys(("architectures", "layer_types", "no_rope_layers", "mlp_only_layers"),
                    ("a list", list)),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), ("an object", dict)),
}  # fmt: skip
_POSITIVE = (
    "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar", "logits_scaling",
    "original_max_position_embeddings", "no_rope_layer_interval", "decoder_sparse_step",
    "sliding_window_pattern", "_sliding_window_pattern", "max_position_embeddings",
)  # fmt: skip
_NUMBERS = (*_POSITIVE, "max_window_layers")
# Keys of checkpoints that others have quantised: transformers', an older one of compressed-tensors,
# and that of MLX.
_QUANTIZATION_KEYS = ("quantization_config", "compression_config", "quantization")


def find_family(architectures: Sequence[str] | None, model_type: str | None) -> Family:
    """Returns the family of a config.json by these two keys; a Llama where it has neither.

    Raises:
      ValueError: it is none of those that jspec knows, or the two keys disagree.
    """
    if not architectures:
        names, types = [model_type or "llama"], {name: name for name in FAMILIES}
    else:
        names = list(architectures)
        types = {family.architecture: family.model_type for family in FAMILIES.values()}
    if len(names) != 1 or names[0] not in types:
        nearest = difflib.get_close_matches(str(names[0]), types, 1, 0.0)[0]
        raise ValueError(
            f"expected an architecture among {', '.join(types)}; got {', '.join(map(str, names))}, "
            f"to which {nearest} is the nearest"
        )
    family = FAMILIES[types[names[0]]]
    if model_type not in (None, family.model_type):
        expected = f"expected model_type to be {family.model_type!r}"
        raise ValueError(f"{expected}, as {family.architecture} has it; got {model_type!r}")
    return family


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


def from_hf_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of any model of `FAMILIES`.

    RoPE may have either spelling: `rope_theta` with `rope_scaling`, or `rope_parameters`.

    Raises:
      ValueError: another architecture, a missing key, an unknown key, or a value that jspec cannot
        honour; the message names it.
    """
    nulls = {key for key in _NUMBERS if raw.get(key) is None}  # as good as missing
    raw = {key: raw[key] for key in raw if key not in nulls}
    _check_kinds(raw)
    family = find_family(raw.pop("architectures", None), raw.pop("model_type", None))
    common = _REQUIRED_VALUES if family.read_all is None else {}
    for key, values in {**common, **family.required}.items():
        value = raw.pop(key, values[0])
        if value not in values:
            raise ValueError(f"expected {key} to be {values[0]!r}, got {value!r}")
    _refuse_quantized(raw)
    if family.read_all is not None:
        config = family.read_all(raw)
        _refuse_strangers(raw, family)
        return config
    keys, defaults = {**_FIELDS, **family.keys}, {**_DEFAULTS, **family.defaults}
    check_sizes(raw, [key for key in _FIELDS if key not in defaults])
    # First what only the family knows: it may rewrite what all families have, such as RoPE.
    fields = dict(family.fixed) | family.read(raw)
    if "rope_theta" in defaults and raw.get("rope_theta") is None:
        raw["rope_theta"] = defaults["rope_theta"]
    fields["rope_theta"], scaling = read_rope(raw)
    fields |= {field: raw.pop(key, defaults.get(key)) for key, field in keys.items()}
    fields |= _derived(fields)
    # Beyond it other frequencies would apply, to keys that are cached already, too.
    if scaling is not None and scaling.kind == "longrope":
        fields["max_seq_len"] = min(fields["max_seq_len"], scaling.original_max_seq_len)
    config = DecoderConfig(**fields, rope_scaling=scaling, family=family.model_type)
    _refuse_strangers(raw, family)
    return config


def _refuse_strangers(raw: Mapping[str, Any], family: Family) -> None:
    given = {key for key, value in raw.items() if value is not None}
    strangers = sorted(given - _IGNORED_KEYS - family.ignored)
    if strangers:
        raise ValueError(f"unknown config keys: {', '.join(strangers)}")


def _check_kinds(raw: Mapping[str, Any]) -> None:
    """Checks lists, objects and numbers; null is as good as a missing key."""
    given = {key: value for key, value in raw.items() if value is not None}
    for key, (expected, kind) in _KINDS.items():
        if not isinstance(given.get(key, kind()), kind):
            raise ValueError(f"expected {key} to be {expected}, got {given[key]!r}")
    if not all(isinstance(name, str) for name in given.get("architectures", ())):
        raise ValueError(f"expected architectures to be names, got {given['architectures']!r}")
    for key in _POSITIVE:
        as_number(key, given.get(key, 1), above=0.0)
    as_number("max_window_layers", given.get("max_window_layers", 0), above=-1.0)


def _derived(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that follow from others where a config.json does not say them."""
    eos = fields["eos_ids"]  # one id, a list, or none
    kv_heads, head_dim = fields["num_kv_heads"], fields["head_dim"]
    return {
        "num_kv_heads": fields["num_heads"] if kv_heads is None else kv_heads,
        "head_dim": fields["embed_dim"] // fields["num_heads"] if head_dim is None else head_dim,
        "eos_ids": tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,),
        # One key says it of all four products; only Qwen2's output has none.
        "qkv_bias": fields.get("qkv_bias", False) or bool(fields.get("out_bias")),
        "out_bias": bool(fields.get("out_bias")),
        "mlp_bias": bool(fields.get("mlp_bias")),
    }


def to_hf_config(config: DecoderConfig) -> dict[str, Any]:
    """Returns the config.json contents that `from_hf_config` reads back as the same config."""
    family = FAMILIES[config.family]
    if family.read_all is not None:
        names = {"architectures": [family.architecture], "model_type": family.model_type}
        return names | family.write_all(config)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_act": "silu",
        "rope_parameters": write_rope(config.rope_theta, config.rope_scaling),
        **{key: values[0] for key, values in family.required.items()},
        **{key: getattr(config, field) for key, field in {**_FIELDS, **family.keys}.items()},
        "eos_token_id": list(config.eos_ids),
        **family.write(config),
    }

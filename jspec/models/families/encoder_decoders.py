"""T5 (arXiv 1910.10683), T5 1.1 and Whisper (2212.04356); see `encoder_decoder`."""

from typing import Any

from jspec.models.config import DecoderConfig, EncoderConfig
from jspec.models.families.family import Family, take_ends, take_keys

_SIZES = {
    "vocab_size": "vocab_size", "d_model": "embed_dim", "d_kv": "head_dim", "d_ff": "hidden_dim",
    "num_layers": "num_layers", "num_heads": "num_heads",
}  # fmt: skip
# What `feed_forward_proj` means: the activation, and whether there is a gate.
_FORMS = {"relu": ("relu", False), "gelu": ("gelu", False), "gated-relu": ("relu", True),
          "gated-gelu": ("gelu_tanh", True)}  # fmt: skip
_CONTEXT = 512  # of both sides in training; relative positions set no limit


def _read_t5(raw: dict[str, Any]) -> DecoderConfig:
    fields = take_keys(raw, _SIZES)
    num_layers, heads = fields.pop("num_layers"), fields["num_heads"]
    num_decoder_layers = raw.pop("num_decoder_layers", None)
    form = raw.pop("feed_forward_proj", "relu")
    if form not in _FORMS:
        known = ", ".join(map(repr, _FORMS))
        raise ValueError(f"expected feed_forward_proj among {known}; got {form!r}")
    activation, is_gated = _FORMS[form]
    # The original's head is its embedding, and scaled; newer files say the two apart. Those of
    # T5 1.1 then call the head tied even where they hold a separate head: see `is_called_tied`.
    is_tied = raw.pop("tie_word_embeddings", True) is not False
    is_scaled = raw.pop("scale_decoder_outputs", is_tied) is not False
    context = raw.pop("n_positions", None) or _CONTEXT
    start_id = raw.pop("decoder_start_token_id", None)
    encoder = EncoderConfig(
        num_layers=num_layers,
        num_heads=heads,
        head_dim=fields["head_dim"],
        hidden_dim=fields["hidden_dim"],
        max_len=context,
        start_id=raw.get("pad_token_id") or 0 if start_id is None else start_id,
        num_buckets=raw.pop("relative_attention_num_buckets", 32),
        max_distance=raw.pop("relative_attention_max_distance", 128),
        is_gated=is_gated,
    )
    return DecoderConfig(
        **fields,
        num_layers=num_layers if num_decoder_layers is None else num_decoder_layers,
        num_kv_heads=heads,
        max_seq_len=context,
        norm_epsilon=raw.pop("layer_norm_epsilon", 1e-6),
        tie_embeddings=is_tied,
        eos_ids=take_ends(raw, 1),
        family="t5",
        activation=activation,
        attention_scale=1.0,
        logits_scale=fields["embed_dim"] ** -0.5 if is_scaled else 1.0,
        encoder=encoder,
    )


def is_called_tied(config: DecoderConfig) -> bool:
    """Returns whether a T5 1.1 is called tied: transformers 5 writes so of all of them."""
    return config.family == "t5" and config.tie_embeddings and config.logits_scale == 1


def _write_t5(config: DecoderConfig) -> dict[str, Any]:
    encoder = config.encoder
    assert encoder is not None
    forms = {form: name for name, form in _FORMS.items()}
    sizes = {key: getattr(config, field) for key, field in _SIZES.items()}
    return {
        **sizes,
        "num_layers": encoder.num_layers,
        "num_decoder_layers": config.num_layers,
        "feed_forward_proj": forms[config.activation, encoder.is_gated],
        "tie_word_embeddings": config.tie_embeddings,
        "scale_decoder_outputs": config.logits_scale != 1,
        "n_positions": encoder.max_len,
        "decoder_start_token_id": encoder.start_id,
        "pad_token_id": encoder.start_id,
        "eos_token_id": list(config.eos_ids),
        "relative_attention_num_buckets": encoder.num_buckets,
        "relative_attention_max_distance": encoder.max_distance,
        "layer_norm_epsilon": config.norm_epsilon,
        "is_encoder_decoder": True,
    }


T5 = Family(
    "T5ForConditionalGeneration",
    "t5",
    # The last three follow from the key above.
    ignored=frozenset({"dropout_rate", "initializer_factor", "classifier_dropout", "output_past",
                       "is_encoder_decoder", "is_decoder", "dense_act_fn", "is_gated_act",
                       "max_position_embeddings"}),
    read_all=_read_t5,
    write_all=_write_t5,
)  # fmt: skip

_DECODER = {
    "vocab_size": "vocab_size", "d_model": "embed_dim", "decoder_ffn_dim": "hidden_dim",
    "decoder_layers": "num_layers", "decoder_attention_heads": "num_heads",
}  # fmt: skip
_ENCODER = {
    "encoder_layers": "num_layers", "encoder_attention_heads": "num_heads",
    "encoder_ffn_dim": "hidden_dim",
}  # fmt: skip


def _read_whisper(raw: dict[str, Any]) -> DecoderConfig:
    fields, of_encoder = take_keys(raw, _DECODER), take_keys(raw, _ENCODER)
    width, heads = fields["embed_dim"], fields["num_heads"]
    for name, number in (("decoder", heads), ("encoder", of_encoder["num_heads"])):
        if width % number:
            expected = f"{name}_attention_heads to divide d_model {width}"
            raise ValueError(f"expected {expected}, got {number}")
    encoder = EncoderConfig(
        **of_encoder,
        head_dim=width // of_encoder["num_heads"],
        max_len=raw.pop("max_source_positions", 1500),
        start_id=raw.pop("decoder_start_token_id", 50257),
        num_mels=raw.pop("num_mel_bins", 80),
        is_gated=False,
        never_ids=tuple(raw.pop("suppress_tokens", None) or ()),
        never_first_ids=tuple(raw.pop("begin_suppress_tokens", None) or ()),
    )
    return DecoderConfig(
        **fields,
        num_kv_heads=heads,
        head_dim=width // heads,
        max_seq_len=raw.pop("max_target_positions", 448),
        tie_embeddings=True,
        bos_id=raw.pop("bos_token_id", None),
        eos_ids=take_ends(raw, 50256),
        family="whisper",
        activation=raw.pop("activation_function", "gelu"),
        encoder=encoder,
    )


def _write_whisper(config: DecoderConfig) -> dict[str, Any]:
    encoder = config.encoder
    assert encoder is not None
    return {
        **{key: getattr(config, field) for key, field in _DECODER.items()},
        **{key: getattr(encoder, field) for key, field in _ENCODER.items()},
        "max_source_positions": encoder.max_len,
        "max_target_positions": config.max_seq_len,
        "num_mel_bins": encoder.num_mels,
        "decoder_start_token_id": encoder.start_id,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids),
        "activation_function": config.activation,
        "suppress_tokens": list(encoder.never_ids),
        "begin_suppress_tokens": list(encoder.never_first_ids),
        "is_encoder_decoder": True,
    }


WHISPER = Family(
    "WhisperForConditionalGeneration",
    "whisper",
    required={
        "scale_embedding": (False,),
        "activation_function": ("gelu",),
        "tie_word_embeddings": (True,),
    },
    # Dropout, masks of training, and how answers are asked for.
    ignored=frozenset({"activation_dropout", "dropout", "encoder_layerdrop", "decoder_layerdrop",
                       "init_std", "num_hidden_layers", "apply_spec_augment", "mask_time_prob",
                       "mask_time_length", "mask_time_min_masks", "mask_feature_prob",
                       "mask_feature_length", "mask_feature_min_masks", "median_filter_width",
                       "classifier_proj_size", "use_weighted_layer_sum", "forced_decoder_ids",
                       "is_encoder_decoder", "max_length"}),
    read_all=_read_whisper,
    write_all=_write_whisper,
)  # fmt: skip

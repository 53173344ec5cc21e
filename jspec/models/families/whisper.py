"""Whisper (arXiv 2212.04356): an encoder-decoder that hears; see `encoder_decoder`."""

from typing import Any

from jspec.models.config import DecoderConfig, EncoderConfig
from jspec.models.families.family import Family, take_ends, take_keys

_DECODER = {
    "vocab_size": "vocab_size", "d_model": "embed_dim", "decoder_ffn_dim": "hidden_dim",
    "decoder_layers": "num_layers", "decoder_attention_heads": "num_heads",
}  # fmt: skip
_ENCODER = {
    "encoder_layers": "num_layers", "encoder_attention_heads": "num_heads",
    "encoder_ffn_dim": "hidden_dim",
}  # fmt: skip


def _read(raw: dict[str, Any]) -> DecoderConfig:
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


def _write(config: DecoderConfig) -> dict[str, Any]:
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
    read_all=_read,
    write_all=_write,
)  # fmt: skip

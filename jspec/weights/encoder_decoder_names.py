"""The tensors of encoder-decoders, in Hugging Face's names; see `tensor_names`."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jspec.models.config import DecoderConfig
from jspec.models.encoder_decoder import as_encoder
from jspec.weights.parameter import ALL, WHOLE, Parameter, Part, Path, linear, one_tensor

HEAD = "lm_head.weight"  # a T5's, if it is not the embedding


class _Names(NamedTuple):
    """What a family calls the parts of a side and of its layers, after the layer's own name.

    Attributes:
      layers: of a side.
      final_norm: of a side.
      attention: queries, keys, values, outputs and the norm before.
      cross: the same of cross-attention.
      mlp: by whether it is a decoder's: the products and the norm before.
    """

    layers: str
    final_norm: str
    attention: Sequence[str]
    cross: Sequence[str]
    mlp: Mapping[bool, Sequence[str]]


def _t5(is_gated: bool) -> _Names:
    products = ("wi_0", "wi_1", "wo") if is_gated else ("wi", "wo")

    def half(place: int, parts: Sequence[str], name: str) -> list[str]:
        return [*(f"layer.{place}.{name}.{part}" for part in parts), f"layer.{place}.layer_norm"]

    return _Names(
        "block",
        "final_layer_norm",
        half(0, "qkvo", "SelfAttention"),
        half(1, "qkvo", "EncDecAttention"),
        {is_last: half(1 + is_last, products, "DenseReluDense") for is_last in (False, True)},
    )


def _whisper() -> _Names:
    def attention(name: str) -> list[str]:
        heads = (f"{name}.{part}_proj" for part in ("q", "k", "v", "out"))
        return [*heads, f"{name}_layer_norm"]

    mlp = "fc1", "fc2", "final_layer_norm"
    attentions = attention("self_attn"), attention("encoder_attn")
    return _Names("layers", "layer_norm", *attentions, dict.fromkeys((False, True), mlp))


def encoder_decoder_table(config: DecoderConfig) -> list[Parameter]:
    """Returns every parameter of an encoder-decoder with its tensors, see `parameter_table`."""
    assert config.encoder is not None
    vocabulary = config.vocab_size, config.embed_dim
    if config.encoder.is_audio:
        prefix, positions = "model.decoder", (config.max_seq_len, config.embed_dim)
        return [
            *_ears(config),
            *_side(config, ("encoder",), "model.encoder", _whisper()),
            one_tensor(("embedding",), f"{prefix}.embed_tokens.weight", vocabulary),
            one_tensor(("positions",), f"{prefix}.embed_positions.weight", positions),
            *_side(config, (), prefix, _whisper()),
        ]
    table = [one_tensor(("embedding",), "shared.weight", vocabulary)]
    for side, path in (("encoder", ("encoder",)), ("decoder", ())):
        part = as_encoder(config) if path else config
        bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        shape = config.encoder.num_buckets, part.num_heads
        table.append(one_tensor((*path, "relative"), bias, shape))
        table += _side(config, path, side, _t5(config.encoder.is_gated))
    if not config.tie_embeddings:
        table.append(one_tensor(("head",), HEAD, vocabulary))
    return table


def tied_copies(config: DecoderConfig) -> dict[str, str]:
    """Returns the tensors that files may hold besides, and of which each is a copy."""
    assert config.encoder is not None
    if config.encoder.is_audio:
        return {"proj_out.weight": "model.decoder.embed_tokens.weight"}
    copies = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    copies += [HEAD] * config.tie_embeddings
    return dict.fromkeys(copies, "shared.weight")


def _ears(config: DecoderConfig) -> list[Parameter]:
    """Returns what a Whisper has before the layers of its encoder."""
    encoder, prefix, width = config.encoder, "model.encoder", config.embed_dim
    assert encoder is not None
    table = []
    for number, inputs in ((1, encoder.num_mels), (2, width)):
        key, name = f"conv_{number}", f"{prefix}.conv{number}"
        table.append(one_tensor(("encoder", key), f"{name}.weight", (width, inputs, 3)))
        table.append(one_tensor(("encoder", f"{key}_bias"), f"{name}.bias", (width,)))
    positions = f"{prefix}.embed_positions.weight"
    return [*table, one_tensor(("encoder", "positions"), positions, (encoder.max_len, width))]


def _side(config: DecoderConfig, path: Path, prefix: str, names: _Names) -> list[Parameter]:
    part, table = as_encoder(config) if path else config, []
    for layer in range(part.num_layers):
        name = f"{prefix}.{names.layers}.{layer}"
        table += _layer(part, (*path, f"layers_{layer}"), name, names, is_decoder=not path)
    return table + _norm(part, (*path, "final_norm"), f"{prefix}.{names.final_norm}")


def _layer(
    config: DecoderConfig, key: Path, prefix: str, names: _Names, *, is_decoder: bool
) -> list[Parameter]:
    assert config.encoder is not None
    table: list[Parameter] = []
    for kind, parts in (("attention", names.attention), ("cross", names.cross))[: 1 + is_decoder]:
        *heads, norm = (f"{prefix}.{name}" for name in parts)
        table += _norm(config, (*key, f"{kind}_norm"), norm) + _attention(config, key, kind, heads)
    *products, norm = (f"{prefix}.{name}" for name in names.mlp[is_decoder])
    table += _norm(config, (*key, "mlp_norm"), norm)
    path, has_bias = (*key, "mlp"), config.encoder.is_audio
    wide, hidden = config.embed_dim, config.hidden_dim
    if config.encoder.is_gated:
        halves = {products[0]: (0,), products[1]: (1,)}
        table += linear((*path, "gate_up"), (2, hidden), wide, halves)
    else:
        table += linear((*path, "up"), (hidden,), wide, {products[0]: WHOLE}, has_bias)
    return table + linear((*path, "down"), (wide,), hidden, {products[-1]: WHOLE}, has_bias)


def _attention(config: DecoderConfig, key: Path, kind: str, names: list[str]) -> list[Parameter]:
    """Returns the attention or the cross-attention of a layer; keys have no bias."""
    assert config.encoder is not None
    heads, groups, dim = config.num_kv_heads, config.num_groups, config.head_dim
    wide, path, has_bias = config.embed_dim, (*key, kind), config.encoder.is_audio
    query, key_name, value, out = names
    if kind == "cross":
        pair = {key_name: (ALL, 0), value: (ALL, 1)}
        table = linear((*path, "query"), (heads, groups, dim), wide, {query: WHOLE})
        table += linear((*path, "key_value"), (heads, 2, dim), wide, pair)
    else:
        parts = {query: (ALL, slice(None, groups)), key_name: (ALL, groups)}
        parts[value] = ALL, groups + 1
        table = linear((*path, "qkv"), (heads, groups + 2, dim), wide, parts)
    biases = ("query_bias", query, (heads, groups, dim)), ("value_bias", value, (heads, dim))
    for name, tensor, shape in biases if has_bias else ():
        part = Part(f"{tensor}.bias", (math.prod(shape),))
        table.append(Parameter((*path, name), shape, (part,)))
    return table + linear((*path, "out"), (wide,), groups * heads * dim, {out: WHOLE}, has_bias)


def _norm(config: DecoderConfig, path: Path, name: str) -> list[Parameter]:
    assert config.encoder is not None
    wide = (config.embed_dim,)
    kinds = {"scale": "weight"} | ({"bias": "bias"} if config.encoder.is_audio else {})
    return [one_tensor((*path, key), f"{name}.{kind}", wide) for key, kind in kinds.items()]

"""The tensors of encoder-decoders, in Hugging Face's names; see `tensor_names`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jspec.models.config import DecoderConfig
from jspec.models.encoder_decoder import as_encoder
from jspec.weights.parameter import Parameter, Part, Path, Shape, one_tensor

HEAD = "lm_head.weight"  # a T5's, if it is not the embedding
_ALL, _WHOLE = slice(None), (Ellipsis,)


class _Names(NamedTuple):
    """What a family calls the parts of a layer, after the layer's own name.

    Attributes:
      attention: queries, keys, values, outputs and the norm before.
      cross: the same of cross-attention.
      mlp: by whether it is a decoder's: the products and the norm before.
    """

    attention: tuple[str, ...]
    cross: tuple[str, ...]
    mlp: Mapping[bool, tuple[str, ...]]


def _t5(is_gated: bool) -> _Names:
    products = ("wi_0", "wi_1", "wo") if is_gated else ("wi", "wo")

    def attention(place: int, name: str) -> tuple[str, ...]:
        heads = (f"layer.{place}.{name}.{part}" for part in "qkvo")
        return (*heads, f"layer.{place}.layer_norm")

    def mlp(place: int) -> tuple[str, ...]:
        layers = (f"layer.{place}.DenseReluDense.{product}" for product in products)
        return (*layers, f"layer.{place}.layer_norm")

    return _Names(
        attention(0, "SelfAttention"),
        attention(1, "EncDecAttention"),
        {False: mlp(1), True: mlp(2)},
    )


def _whisper() -> _Names:
    def attention(name: str) -> tuple[str, ...]:
        heads = (f"{name}.{part}_proj" for part in ("q", "k", "v", "out"))
        return (*heads, f"{name}_layer_norm")

    mlp = "fc1", "fc2", "final_layer_norm"
    return _Names(attention("self_attn"), attention("encoder_attn"), {False: mlp, True: mlp})


def encoder_decoder_table(config: DecoderConfig) -> list[Parameter]:
    """Returns every parameter of an encoder-decoder with its tensors, see `parameter_table`."""
    assert config.encoder is not None
    if config.encoder.is_audio:
        return [*_whisper_encoder(config), *_whisper_decoder(config)]
    table = [one_tensor(("embedding",), "shared.weight", (config.vocab_size, config.embed_dim))]
    names = _t5(config.encoder.is_gated)
    for side, path in (("encoder", ("encoder",)), ("decoder", ())):
        part = as_encoder(config) if path else config
        bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        table.append(one_tensor((*path, "relative"), bias, _relative_shape(part)))
        for layer in range(part.num_layers):
            key = (*path, f"layers_{layer}")
            table += _layer(part, key, f"{side}.block.{layer}", names, is_decoder=not path)
        table += _norm(part, (*path, "final_norm"), f"{side}.final_layer_norm")
    if not config.tie_embeddings:
        table.append(one_tensor(("head",), HEAD, (config.vocab_size, config.embed_dim)))
    return table


def tied_copies(config: DecoderConfig) -> dict[str, str]:
    """Returns the tensors that files may hold besides, and of which each is a copy."""
    assert config.encoder is not None
    if config.encoder.is_audio:
        return {"proj_out.weight": "model.decoder.embed_tokens.weight"}
    copies = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    copies += [HEAD] * config.tie_embeddings
    return dict.fromkeys(copies, "shared.weight")


def _relative_shape(config: DecoderConfig) -> Shape:
    assert config.encoder is not None
    return config.encoder.num_buckets, config.num_heads


def _whisper_encoder(config: DecoderConfig) -> list[Parameter]:
    encoder, prefix, width = config.encoder, "model.encoder", config.embed_dim
    assert encoder is not None
    table, inputs = [], encoder.num_mels
    for number in (1, 2):
        path, name = ("encoder", f"conv_{number}"), f"{prefix}.conv{number}"
        table.append(one_tensor(path, f"{name}.weight", (width, inputs, 3)))
        table.append(one_tensor((*path[:-1], f"{path[-1]}_bias"), f"{name}.bias", (width,)))
        inputs = width
    positions = f"{prefix}.embed_positions.weight"
    table.append(one_tensor(("encoder", "positions"), positions, (encoder.max_len, width)))
    for layer in range(encoder.num_layers):
        key = ("encoder", f"layers_{layer}")
        table += _layer(
            as_encoder(config), key, f"{prefix}.layers.{layer}", _whisper(), is_decoder=False
        )
    return table + _norm(config, ("encoder", "final_norm"), f"{prefix}.layer_norm")


def _whisper_decoder(config: DecoderConfig) -> list[Parameter]:
    prefix, width = "model.decoder", config.embed_dim
    table = [
        one_tensor(("embedding",), f"{prefix}.embed_tokens.weight", (config.vocab_size, width)),
        one_tensor(("positions",), f"{prefix}.embed_positions.weight", (config.max_seq_len, width)),
    ]
    for layer in range(config.num_layers):
        table += _layer(
            config, (f"layers_{layer}",), f"{prefix}.layers.{layer}", _whisper(), is_decoder=True
        )
    return table + _norm(config, ("final_norm",), f"{prefix}.layer_norm")


def _layer(
    config: DecoderConfig, key: Path, prefix: str, names: _Names, *, is_decoder: bool
) -> list[Parameter]:
    assert config.encoder is not None
    *heads, norm = (f"{prefix}.{name}" for name in names.attention)
    table = [*_norm(config, (*key, "attention_norm"), norm), *_self_attention(config, key, heads)]
    if is_decoder:
        *heads, norm = (f"{prefix}.{name}" for name in names.cross)
        table += [*_norm(config, (*key, "cross_norm"), norm), *_cross_attention(config, key, heads)]
    *products, norm = (f"{prefix}.{name}" for name in names.mlp[is_decoder])
    table += _norm(config, (*key, "mlp_norm"), norm)
    path, has_bias, hidden = (*key, "mlp"), config.encoder.is_audio, config.hidden_dim
    if config.encoder.is_gated:
        halves = {products[0]: (0,), products[1]: (1,)}
        table += _product((*path, "gate_up"), (2, hidden), config.embed_dim, halves)
    else:
        table += _product((*path, "up"), (hidden,), config.embed_dim, {products[0]: _WHOLE})
        table += _biases((*path, "up_bias"), (hidden,), products[0], has_bias)
    table += _product((*path, "down"), (config.embed_dim,), hidden, {products[-1]: _WHOLE})
    return table + _biases((*path, "down_bias"), (config.embed_dim,), products[-1], has_bias)


def _self_attention(config: DecoderConfig, key: Path, names: list[str]) -> list[Parameter]:
    heads, groups, dim = config.num_kv_heads, config.num_groups, config.head_dim
    path = (*key, "attention")
    index = {names[0]: (_ALL, slice(None, groups)), names[1]: (_ALL, groups),
             names[2]: (_ALL, groups + 1)}  # fmt: skip
    qkv = _product((*path, "qkv"), (heads, groups + 2, dim), config.embed_dim, index)
    return qkv + _around_attention(config, path, names)


def _cross_attention(config: DecoderConfig, key: Path, names: list[str]) -> list[Parameter]:
    heads, groups, dim, wide = (
        config.num_kv_heads, config.num_groups, config.head_dim, config.embed_dim
    )  # fmt: skip
    path, pair = (*key, "cross"), {names[1]: (_ALL, 0), names[2]: (_ALL, 1)}
    return [
        *_product((*path, "query"), (heads, groups, dim), wide, {names[0]: _WHOLE}),
        *_product((*path, "key_value"), (heads, 2, dim), wide, pair),
        *_around_attention(config, path, names),
    ]


def _around_attention(config: DecoderConfig, path: Path, names: list[str]) -> list[Parameter]:
    """Returns the output product, and the biases, of which keys have none."""
    assert config.encoder is not None
    heads, groups, dim = config.num_kv_heads, config.num_groups, config.head_dim
    wide, has_bias = (config.embed_dim,), config.encoder.is_audio
    return [
        *_biases((*path, "query_bias"), (heads, groups, dim), names[0], has_bias),
        *_biases((*path, "value_bias"), (heads, dim), names[2], has_bias),
        *_product((*path, "out"), wide, config.num_heads * dim, {names[3]: _WHOLE}),
        *_biases((*path, "out_bias"), wide, names[3], has_bias),
    ]


def _product(
    path: Path, out: Shape, num_inputs: int, parts: Mapping[str, tuple[Any, ...]]
) -> list[Parameter]:
    """Returns a kernel [*out i] made of matrices, each of which fills a slice of `out`."""
    whole = np.broadcast_to(False, out)
    tensors = (
        Part(f"{name}.weight", (whole[index].size, num_inputs), index)
        for name, index in parts.items()
    )
    return [Parameter(path, (*out, num_inputs), tuple(tensors))]


def _biases(path: Path, shape: Shape, name: str, has_bias: bool) -> list[Parameter]:
    size = np.broadcast_to(False, shape).size
    part = Part(f"{name}.bias", (size,))
    return [Parameter(path, shape, (part,))] * has_bias


def _norm(config: DecoderConfig, path: Path, name: str) -> list[Parameter]:
    assert config.encoder is not None
    wide = (config.embed_dim,)
    kinds = {"scale": "weight"} | ({"bias": "bias"} if config.encoder.is_audio else {})
    return [one_tensor((*path, key), f"{name}.{kind}", wide) for key, kind in kinds.items()]

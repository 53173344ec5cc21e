"""The table of tensor names: which Hugging Face tensors fill which parameter.

Every checkpoint format is read as Hugging Face tensors. Each tensor fills a slice of one parameter:

```
  layers_3/attention/qkv [K, G+2, H, D]
     [:, :G]   <- model.layers.3.self_attn.q_proj.weight [N·H, D]   (query head n = k·G + g)
     [:, G]    <- model.layers.3.self_attn.k_proj.weight [K·H, D]
     [:, G+1]  <- model.layers.3.self_attn.v_proj.weight [K·H, D]
```

A slice followed by a reshape works in both directions, so one table both loads and saves. Where a
family fuses several of these tensors, each is a range of rows of the fused tensor.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jspec.models.config import DecoderConfig
from jspec.models.encoder_decoder import as_encoder, encoder_of
from jspec.models.families import FAMILIES
from jspec.weights.parameter import (
    ALL,
    WHOLE,
    Parameter,
    Part,
    Path,
    Shape,
    linear,
    one_tensor,
)

_EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"  # if it is not the embedding


def attention_tensors(
    config: DecoderConfig, block: Path, prefix: str, width: int | None = None
) -> list[Parameter]:
    """Returns the attention of a block: queries, keys and values together, and the output.

    `block` is its path and `prefix` that of its tensors' names. The first has `width` inputs, by
    default the model's.
    """
    name = f"{prefix}.self_attn"
    fused_name = f"{name}.qkv_proj" if FAMILIES[config.family].is_fused else None
    kv_heads, groups, head_dim = config.num_kv_heads, config.num_groups, config.head_dim
    qkv = {
        f"{name}.q_proj": (ALL, slice(None, groups)),
        f"{name}.k_proj": (ALL, groups),
        f"{name}.v_proj": (ALL, groups + 1),
    }
    fused, embed, path = (kv_heads, groups + 2, head_dim), config.embed_dim, (*block, "attention")
    out = {f"{name}.o_proj": WHOLE}
    table = [
        *linear((*path, "qkv"), fused, width or embed, qkv, config.qkv_bias, fused_name),
        *linear((*path, "out"), (embed,), config.num_heads * head_dim, out, config.out_bias),
    ]
    if config.qk_norm is not None:
        is_full = config.qk_norm == "full"
        for part, number in (("q", config.num_heads), ("k", kv_heads)):
            key = {"q": "query_norm", "k": "key_norm"}[part]
            shape = (number * head_dim if is_full else head_dim,)
            table.append(_norm(config, (*path, key), f"{name}.{part}_norm", shape))
    return table


def _norm(config: DecoderConfig, path: Path, name: str, shape: Shape) -> Parameter:
    part = Part(f"{name}.weight", shape, offset=FAMILIES[config.family].norm_offset)
    return Parameter((*path, "scale"), shape, (part,))


def mlp_tensors(config: DecoderConfig, block: Path, prefix: str) -> list[Parameter]:
    """Returns the feed-forward layer of a block, gate and up in one; see `attention_tensors`."""
    name, path, has_bias = f"{prefix}.mlp", (*block, "mlp"), config.mlp_bias
    embed, hidden = config.embed_dim, config.hidden_dim
    gate_up = {f"{name}.gate_proj": (0,), f"{name}.up_proj": (1,)}
    fused = f"{name}.gate_up_proj" if FAMILIES[config.family].is_fused else None
    return [
        *linear((*path, "gate_up"), (2, hidden), embed, gate_up, has_bias, fused),
        *linear((*path, "down"), (embed,), hidden, {f"{name}.down_proj": WHOLE}, has_bias),
    ]


def expert_tensors(config: DecoderConfig, block: Path, prefix: str) -> list[Parameter]:
    """Returns a feed-forward layer of experts; see `attention_tensors`."""
    names = FAMILIES[config.family].sparse_names
    if names is None:
        raise ValueError(f"the family {config.family} has no layers of experts")
    layer, *products = names
    experts, wide, width = range(config.num_experts), config.embed_dim, config.expert_dim
    gate, up, down = (
        [f"{prefix}.{layer}.experts.{i}.{product}.weight" for i in experts] for product in products
    )
    halves = [
        Part(half[i], (width, wide), (i, place))
        for place, half in enumerate((gate, up))
        for i in experts
    ]
    downs = tuple(Part(down[i], (wide, width), (i,)) for i in experts)
    path, count = (*block, "mlp"), len(experts)
    return [
        one_tensor((*path, "router"), f"{prefix}.{layer}.gate.weight", (count, wide)),
        Parameter((*path, "experts_gate_up"), (count, 2, width, wide), tuple(halves)),
        Parameter((*path, "experts_down"), (count, wide, width), downs),
    ]


# Norms of a layer, in the order of computation, and Hugging Face's names of them.
_NORMS = {
    "pre": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "post": {
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    "both": {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
}


def block_tensors(config: DecoderConfig, block: Path, prefix: str) -> list[Parameter]:
    """Returns a block that norms before attention and feed-forward; see `attention_tensors`."""
    norms = {path: f"{prefix}.{name}" for path, name in _NORMS["pre"].items()}
    return [
        *(_norm(config, (*block, path), name, (config.embed_dim,)) for path, name in norms.items()),
        *attention_tensors(config, block, prefix),
        *mlp_tensors(config, block, prefix),
    ]


def _mtp_tensors(config: DecoderConfig) -> list[Parameter]:
    """Returns the layer that predicts the token after the next; see `decoder.apply_mtp`."""
    prefix, wide = "model.mtp_layers.0", (config.embed_dim,)
    return [
        *(
            _norm(config, ("mtp", f"{part}_norm"), f"{prefix}.{part}_layernorm", wide)
            for part in ("hidden", "token", "final")
        ),
        one_tensor(("mtp", "fc"), f"{prefix}.input_proj.weight", (*wide, 2 * config.embed_dim)),
        *block_tensors(config, ("mtp", "block"), prefix),
    ]


def parameter_table(config: DecoderConfig) -> list[Parameter]:
    """Returns every parameter of a model with its tensors, in the order of computation."""
    if config.encoder is not None:
        return _encoder_decoder_table(config)
    wide, vocabulary = (config.embed_dim,), (config.vocab_size, config.embed_dim)
    table = [one_tensor(("embedding",), _EMBEDDING, vocabulary)]
    for index in range(config.num_layers):
        key, prefix = f"layers_{index}", f"model.layers.{index}"
        norms = {
            path: _norm(config, (key, path), f"{prefix}.{name}", wide)
            for path, name in _NORMS[config.norms].items()
        }
        halves = {
            "attention": attention_tensors(config, (key,), prefix),
            "mlp": (expert_tensors if config.is_sparse(index) else mlp_tensors)(
                config, (key,), prefix
            ),
        }
        for half, parameters in halves.items():
            table += [norms[path] for path in (f"{half}_norm",) if path in norms]
            table += parameters
            table += [norms[path] for path in (f"{half}_post_norm",) if path in norms]
    table.append(_norm(config, ("final_norm",), "model.norm", wide))
    if not config.tie_embeddings:
        head = (config.head_size or config.vocab_size, config.embed_dim)
        table.append(one_tensor(("head",), HEAD, head))
    return table + (_mtp_tensors(config) if config.num_mtp_layers else [])


def tied_copies(config: DecoderConfig) -> dict[str, str]:
    """Returns the tensors that a file may hold a second time, and what each must be a copy of."""
    if config.encoder is None:
        return {HEAD: _EMBEDDING} if config.tie_embeddings else {}
    if config.encoder.is_audio:
        return {"proj_out.weight": "model.decoder.embed_tokens.weight"}
    copies = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    return dict.fromkeys([*copies, *[HEAD] * config.tie_embeddings], "shared.weight")


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


def _encoder_decoder_table(config: DecoderConfig) -> list[Parameter]:
    """Returns every parameter of an encoder-decoder with its tensors."""
    encoder, vocabulary = encoder_of(config), (config.vocab_size, config.embed_dim)
    if encoder.is_audio:
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
        shape = encoder.num_buckets, part.num_heads
        table.append(one_tensor((*path, "relative"), bias, shape))
        table += _side(config, path, side, _t5(encoder.is_gated))
    if not config.tie_embeddings:
        table.append(one_tensor(("head",), HEAD, vocabulary))
    return table


def _ears(config: DecoderConfig) -> list[Parameter]:
    """Returns what a Whisper has before the layers of its encoder."""
    encoder, prefix, width = encoder_of(config), "model.encoder", config.embed_dim
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
        table += _side_layer(part, (*path, f"layers_{layer}"), name, names, is_decoder=not path)
    return table + _side_norm(part, (*path, "final_norm"), f"{prefix}.{names.final_norm}")


def _side_layer(
    config: DecoderConfig, key: Path, prefix: str, names: _Names, *, is_decoder: bool
) -> list[Parameter]:
    encoder, table = encoder_of(config), list[Parameter]()
    for kind, parts in (("attention", names.attention), ("cross", names.cross))[: 1 + is_decoder]:
        *heads, norm = (f"{prefix}.{name}" for name in parts)
        table += _side_norm(config, (*key, f"{kind}_norm"), norm) + _side_attention(
            config, key, kind, heads
        )
    *products, norm = (f"{prefix}.{name}" for name in names.mlp[is_decoder])
    table += _side_norm(config, (*key, "mlp_norm"), norm)
    path, has_bias = (*key, "mlp"), encoder.is_audio
    wide, hidden = config.embed_dim, config.hidden_dim
    if encoder.is_gated:
        halves = {products[0]: (0,), products[1]: (1,)}
        table += linear((*path, "gate_up"), (2, hidden), wide, halves)
    else:
        table += linear((*path, "up"), (hidden,), wide, {products[0]: WHOLE}, has_bias)
    return table + linear((*path, "down"), (wide,), hidden, {products[-1]: WHOLE}, has_bias)


def _side_attention(
    config: DecoderConfig, key: Path, kind: str, names: list[str]
) -> list[Parameter]:
    """Returns the attention or the cross-attention of a layer; keys have no bias."""
    heads, groups, dim = config.num_kv_heads, config.num_groups, config.head_dim
    wide, path, has_bias = config.embed_dim, (*key, kind), encoder_of(config).is_audio
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


def _side_norm(config: DecoderConfig, path: Path, name: str) -> list[Parameter]:
    wide = (config.embed_dim,)
    kinds = {"scale": "weight"} | ({"bias": "bias"} if encoder_of(config).is_audio else {})
    return [one_tensor((*path, key), f"{name}.{kind}", wide) for key, kind in kinds.items()]

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

from jspec.models.config import DecoderConfig
from jspec.models.families import FAMILIES
from jspec.weights import encoder_decoder_names
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

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


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
        return encoder_decoder_names.encoder_decoder_table(config)
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
        table.append(one_tensor(("head",), _HEAD, head))
    return table + (_mtp_tensors(config) if config.num_mtp_layers else [])


def tied_copies(config: DecoderConfig) -> dict[str, str]:
    """Returns the tensors that a file may hold a second time, and what each must be a copy of."""
    if config.encoder is not None:
        return encoder_decoder_names.tied_copies(config)
    return {_HEAD: _EMBEDDING} if config.tie_embeddings else {}

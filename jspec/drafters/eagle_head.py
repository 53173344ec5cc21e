"""The head of EAGLE-3 (arXiv 2503.01840): a decoder layer that continues the target's features.

    features of three layers of the target at token i  -- fc -->  feature i   [d]
    feature i, embedding of token i+1  -- layer -->  hidden i  -- norm, head -->  probs of token i+2

Where the target has not been yet, `hidden` takes the feature's place: that is how a chain of drafts
is made. The embedding is that of the target.

A folder holds config.json and safetensors, in the layout of published heads:

```
  fc.weight                             [D, 3·D]   fuses the target's features
  midlayer.input_layernorm.weight       [D]        of the embedding
  midlayer.hidden_norm.weight           [D]        of the feature
  midlayer.self_attn.{q,k,v}_proj       [., 2·D]   and o_proj
  midlayer.post_attention_layernorm, midlayer.mlp.{gate,up,down}_proj, norm
  lm_head.weight                        [U, D]
  d2t                                   [U]        the target's id of a draft id, less the draft id
  t2d                                   [V]        whether the head can propose the id
```

A head whose matrices are int8 (see `safetensors_file`) runs in int8.

Heads of P-EAGLE (arXiv 2602.01469) draft in one pass: at the places of the drafts a token of the
vocabulary, `mask_token_id`, stands for the token, and a learned output of the target for the
feature. Every mask sees the pairs and the masks before it. Their folders have besides

```
  mask_hidden                        [1, 1, 3·D]   what takes the target's outputs' place
  embed_tokens.weight                [V, D]        if the embedding is not the target's
  layers.{i}.*                                     as in a Llama, for 1 <= i < num_hidden_layers
```

and `ptd_token_id` in config.json. See `eagle_layouts` for how else heads are written.

Heads of EAGLE-3.1 (arXiv 2605.09992) have `norm_before_fc`, with a tensor input_norm.weight [3·D],
and `norm_output`: what takes a feature's place is the output after `norm`.
"""

import dataclasses
import pathlib
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Float32, Int

from jspec.common.errors import InputError
from jspec.common.typing import Params
from jspec.drafters.eagle_layouts import (
    DEPTH,
    EMBEDDING,
    FILE,
    LAYERS_GROUP,
    LAYERS_KEY,
    MASK,
    NORMS,
    pop_layers,
    pop_mask,
    published_config,
    published_names,
    written_mask,
)
from jspec.drafters.head_folder import (
    FeatureHead,
    LoadedHead,
    in_order,
    pack_params,
    read_any_config,
    read_ids,
    read_stored,
    unpack_params,
    write_head,
    written_ids,
)
from jspec.models.cache import KVCache, causal_mask
from jspec.models.config import DecoderConfig
from jspec.models.decoder import Block, apply_layer, init_cache
from jspec.models.families.hf_config import from_hf_config, to_hf_config
from jspec.models.layers import Attention, FeedForward, RMSNorm, kernel_param, linear, rope_cos_sin
from jspec.weights.parameter import Parameter, Path, one_tensor
from jspec.weights.quantize import is_kernel, quantize
from jspec.weights.safetensors_file import FloatTensors
from jspec.weights.tensor_names import attention_tensors, block_tensors, mlp_tensors


@dataclasses.dataclass(frozen=True)
class EagleConfig(FeatureHead):
    """The shape of a head; with a `mask_id` of one that drafts in one pass.

    Attributes:
      has_input_norm: whether the target's outputs are normed, together, before they are fused.
      has_output_norm: whether what takes a feature's place is the head's output after its norm.
      has_residual_norm: whether the layer adds to the feature after its norm.
      most_drafts: the drafts that such a head was trained for; 0 if it is not known.
    """

    has_input_norm: bool = False
    has_output_norm: bool = False
    has_residual_norm: bool = False
    most_drafts: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask_id is None and self.layer.num_layers != 1:
            raise ValueError(f"expected a head of one layer, got {self.layer.num_layers}")
        if type(self.most_drafts) is not int or self.most_drafts < 0:
            raise ValueError(
                f"expected num_depths as a whole number of at least 1, got {self.most_drafts!r}"
            )


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Returns a low, a middle and a high layer of a target, as published heads take them."""
    return min(2, num_layers), num_layers // 2, max(num_layers - 3, 1)


class EagleLayer(nn.Module):
    """A decoder layer whose attention reads something else than the residual stream."""

    PARTS: ClassVar = ("attention", "mlp_norm", "mlp")

    config: DecoderConfig

    @nn.compact
    def __call__(
        self,
        x: Float32[Array, "b t d"],
        rope: tuple[Float32[Array, "b t half"], Float32[Array, "b t half"]],
        visible: Bool[Array, "b t s"],
        cache: KVCache,
        pair: Float32[Array, "b t i"],
        block_offset: int = 0,
    ) -> tuple[Float32[Array, "b t d"], KVCache]:
        """Applies it to the stream, the one-layer cache, and what attention reads."""
        cfg = self.config
        mixed, cache = Attention(cfg, name="attention")(pair, rope, visible, cache, block_offset)
        # The residual is the feature before its norm; see `speculators` for the other kind.
        x = x + mixed
        normed = RMSNorm(cfg.norm_epsilon, name="mlp_norm")(x)
        return x + FeedForward(cfg, name="mlp")(normed), cache


class EagleHead(nn.Module):
    """The layer, further ones of a P-EAGLE, the norm and the head."""

    config: EagleConfig

    @nn.compact
    def __call__(
        self,
        embedded: Float[Array, "b t d"],
        features: Float[Array, "b t d"],
        cache: KVCache,
        logits_at: Int[Array, "b *l"] | None = None,
        positions: Int[Array, "b t"] | None = None,
        block_mask: Bool[Array, "#b t s"] | None = None,
    ) -> tuple[Float32[Array, "b l u"], Float32[Array, "b t d"], KVCache]:
        """Runs one block of pairs; see `apply_head`."""
        cfg = self.config.layer
        eps, num_tokens = cfg.norm_epsilon, embedded.shape[1]
        if positions is None:  # pair i has position i, although its token stands at i + 1
            positions = cache.length[:, None] + jnp.arange(num_tokens)
        mask = causal_mask(num_tokens) if block_mask is None else block_mask
        rope, visible = rope_cos_sin(cfg, positions), cache.visible(mask)
        x = features.astype(jnp.float32)
        normed = RMSNorm(eps, name="embedding_norm")(embedded.astype(jnp.float32))
        # [b t 2·d], embedding first: the order in which published heads have their columns.
        feature = RMSNorm(eps, name="feature_norm")(x)
        pair = jnp.concatenate([normed, feature], axis=-1)
        if self.config.has_residual_norm:
            x = feature
        inputs = x, rope, visible, cache.layer(0), pair
        offset = mask.shape[-1] - num_tokens  # as in `Decoder`
        if self.is_initializing():
            layer = EagleLayer(cfg)
            nn.share_scope(self, layer)  # published heads have no name between
            x, layer_cache = layer(*inputs)
        else:
            layer_params = {name: self.get_variable("params", name) for name in EagleLayer.PARTS}
            x, layer_cache = apply_layer(EagleLayer(cfg), cfg, offset, layer_params, *inputs)
        cache = cache.with_layer(0, layer_cache)
        for index in range(1, cfg.num_layers):
            inputs, name = (x, rope, visible, cache.layer(index)), f"layers_{index}"
            if self.is_initializing():
                x, layer_cache = Block(cfg, name=name)(*inputs, 0)
            else:
                layer_params = self.get_variable("params", name)
                x, layer_cache = apply_layer(Block(cfg), cfg, offset, layer_params, *inputs)
            cache = cache.with_layer(index, layer_cache)
        norm = RMSNorm(eps, name="final_norm")
        if self.config.has_output_norm:
            x = norm(x)
        outputs = x
        if logits_at is not None:
            # Before the head: a few rows of logits are made instead of t.
            outputs = jnp.take_along_axis(x, logits_at.reshape(len(x), -1, 1), axis=1)
        if not self.config.has_output_norm:
            # `x` goes on without the norm, as it stands for the next feature.
            outputs = norm(outputs)
        head = kernel_param(self, "head", (cfg.vocab_size, cfg.embed_dim))
        return linear(outputs, head), x, cache


def fuse(
    params: Params, features: Float[Array, "b t l d"], epsilon: float = 1e-6
) -> Float32[Array, "b t d"]:
    """Returns one feature a token of the outputs of the target's `feature_layers`, [b t l d].

    `epsilon` is that of the norm before, if any.
    """
    b, t = features.shape[:2]
    # Layers side by side, [b t l·d], in the order of `feature_layers`.
    wide = features.reshape(b, t, -1)
    if "input_norm" in params:
        norm = RMSNorm(epsilon)
        wide = norm.apply({"params": params["input_norm"]}, wide.astype(jnp.float32))
    return linear(wide, params["fc"])  # type: ignore[arg-type]


def mask_feature(config: EagleConfig, params: Params) -> Float32[Array, "1 1 d"]:
    """Returns what takes a feature's place at a mask."""
    outputs = params["mask"].reshape(1, 1, len(config.feature_layers), -1)
    return fuse(params, outputs, config.layer.norm_epsilon)


def apply_head(
    config: EagleConfig,
    params: Params,
    embedded: Float[Array, "b t d"],
    features: Float[Array, "b t d"],
    cache: KVCache,
    *,
    logits_at: Int[Array, "b *l"] | None = None,
    positions: Int[Array, "b t"] | None = None,
    block_mask: Bool[Array, "#b t s"] | None = None,
) -> tuple[Float32[Array, "b l u"], Float32[Array, "b t d"], KVCache]:
    """Runs the head on one block of pairs (feature of token i, embedding of token i + 1).

    Args:
      config: the head's.
      params: see `init_eagle_params`.
      embedded: embeddings of the later tokens, the target's or the head's.
      features: fused features of the earlier ones, or the head's own outputs for them.
      cache: the head's; pair i has position and slot i.
      logits_at: compute logits at this one index of each row's block only, or at these, [b l].
      positions: of the pairs; None for a chain.
      block_mask: which pairs of the block each sees; see `ApplyFn`.

    Returns the logits of the tokens after the later ones, [b t u], [b 1 u] or [b l u], what takes
    the place of their features, [b t d], and the cache, with nothing committed.
    """
    return EagleHead(config).apply(  # type: ignore[return-value]
        {"params": params["head"]},
        embedded,
        features,
        cache,
        logits_at=logits_at,
        positions=positions,
        block_mask=block_mask,
    )


def init_eagle_params(config: EagleConfig, rng_key: Array) -> dict[str, Any]:
    """Returns a head without training that can propose the first tokens; the key is consumed.

    Its parameters: `fc` [d l·d], `head` (the module's) and `ids` [u], the target's ids of those
    tokens; where the config has them `input_norm`, `mask` [1 1 l·d] and `embedding` [v d].
    """
    shape, small = config.layer, nn.initializers.normal(0.02)
    head_key, fc_key = jax.random.split(rng_key)
    # Flax only needs shapes here; nothing in the cache is kept.
    cache = init_cache(shape, batch_size=1, capacity=2, dtype=jnp.float32)
    some = jnp.zeros([1, 1, shape.embed_dim], jnp.float32)
    extra: dict[str, Any] = {}
    if config.has_input_norm:
        extra["input_norm"] = {"scale": jnp.ones([config.feature_dim])}
    if config.mask_id is not None:
        extra["mask"] = small(jax.random.fold_in(fc_key, 1), (1, 1, config.feature_dim))
    if config.has_embedding:
        size = config.target_vocab_size, shape.embed_dim
        extra["embedding"] = small(jax.random.fold_in(fc_key, 2), size)
    return extra | {
        "fc": small(fc_key, (shape.embed_dim, config.feature_dim)),
        "head": EagleHead(config).init(head_key, some, some, cache)["params"],
        "ids": jnp.arange(shape.vocab_size, dtype=jnp.int32),
    }


_ARCHITECTURE = "LlamaForCausalLMEagle3"


def eagle_rules(config: EagleConfig) -> list[Parameter]:
    """Returns the table from a head's tensors to its parameters, `ids` apart."""
    shape, embed = config.layer, (config.layer.embed_dim,)
    extra = []
    if config.has_input_norm:
        path = "input_norm", "scale"
        extra.append(one_tensor(path, "input_norm.weight", (config.feature_dim,)))
    if config.mask_id is not None:
        extra.append(one_tensor(("mask",), MASK, (1, 1, config.feature_dim)))
    if config.has_embedding:
        extra.append(one_tensor(("embedding",), EMBEDDING, (config.target_vocab_size, *embed)))
    for index in range(1, shape.num_layers):
        extra += block_tensors(shape, ("head", f"layers_{index}"), f"layers.{index}")
    return [
        *extra,
        one_tensor(("fc",), "fc.weight", (*embed, config.feature_dim)),
        one_tensor(("head", "embedding_norm", "scale"), "midlayer.input_layernorm.weight", embed),
        one_tensor(("head", "feature_norm", "scale"), "midlayer.hidden_norm.weight", embed),
        # Twice as wide as usual: the layer reads the embedding and the feature.
        *attention_tensors(shape, ("head",), "midlayer", 2 * shape.embed_dim),
        one_tensor(
            ("head", "mlp_norm", "scale"), "midlayer.post_attention_layernorm.weight", embed
        ),
        *mlp_tensors(shape, ("head",), "midlayer"),
        one_tensor(("head", "final_norm", "scale"), "norm.weight", embed),
        one_tensor(("head", "head"), "lm_head.weight", (shape.vocab_size, *embed)),
    ]


def load_eagle(folder: pathlib.Path, target: DecoderConfig, dtype: Any) -> LoadedHead:
    """Loads a head that was trained for a target; int8 matrices become `QuantizedKernel`s.

    Raises:
      InputError: anything missing, damaged, of another shape, or of another target.
    """
    path, raw = folder / "config.json", read_any_config(folder, "a head of EAGLE-3")
    stored = published_names(read_stored(path.with_name(FILE)))
    config = _read_config(path, raw, target, stored)
    ids = in_order(stored, read_ids(folder, stored, config))
    tensors, rules = FloatTensors(stored), eagle_rules(config)
    if any(tensor.dtype == np.int8 for tensor in stored.values()):

        def finish(path: Path, leaf: jax.Array) -> Any:
            return quantize(leaf, path, "int8", dtype) if is_kernel(path) else leaf.astype(dtype)

        # One matrix at a time, so that the head is never whole in float32.
        params = pack_params(folder, tensors, rules, "float32", finish)
    else:
        params = pack_params(folder, tensors, rules, dtype)
    return LoadedHead(config, params | {"ids": jax.device_put(ids)}, str(folder))


def _read_config(
    path: pathlib.Path, raw: dict[str, Any], target: DecoderConfig, tensors: Any
) -> EagleConfig:
    """Returns the config of a head; `tensors` are the names of what is stored."""
    try:
        raw = published_config(raw)
        if "hidden_size" not in raw:
            raise ValueError("expected the config.json of a head of EAGLE-3; it has no hidden_size")
        num_drafts = raw.pop("draft_vocab_size", raw.get("vocab_size"))
        group = raw.get(LAYERS_GROUP)
        if isinstance(group, dict):  # some heads say it there
            raw = {key: group[key] for key in NORMS if key in group} | raw
        norms = {field: bool(raw.pop(key, False)) for key, field in NORMS.items()}
        layers, depth = pop_layers(raw), raw.pop(DEPTH, None) or 0
        fields = norms | pop_mask(raw) | {"has_embedding": EMBEDDING in tensors}
        # Apart from its input the layer is Llama's, so its config is read as Llama's.
        shape = from_hf_config(raw | {"architectures": ["LlamaForCausalLM"]})
        # The layer's vocabulary is what it proposes; the target's goes to `EagleConfig`.
        layer = dataclasses.replace(shape, vocab_size=num_drafts, tie_embeddings=False)
        layers = default_feature_layers(target.num_layers) if layers is None else layers
        config = EagleConfig(layer, shape.vocab_size, tuple(map(int, layers)), depth, **fields)
    # An InputError is a ValueError too, and has named the file already.
    except InputError:
        raise
    except (ValueError, TypeError) as error:
        raise InputError(f"{path}: {error}") from None
    config.check_target(path.parent, target)
    return config


def save_eagle(folder: pathlib.Path, config: EagleConfig, params: dict[str, Any]) -> None:
    """Writes a head; the folder appears when it is complete.

    Raises:
      InputError: the folder exists or cannot be written.
    """
    tensors = written_ids(config, np.asarray(params["ids"]))
    tensors |= unpack_params(eagle_rules(config), params)
    text = to_hf_config(config.plain_layer) | {
        "architectures": [_ARCHITECTURE],
        "draft_vocab_size": config.layer.vocab_size,
        LAYERS_KEY: list(config.feature_layers),
        DEPTH: config.target_num_layers or None,
        **({} if config.mask_id is None else written_mask(config.mask_id, config.most_drafts)),
        **{key: True for key, field in NORMS.items() if getattr(config, field)},
        "dtype": str(params["fc"].dtype),
    }
    write_head(folder, FILE, tensors, text)

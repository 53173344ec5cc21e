"""A decoder that reads a block of masks once (DFlash, arXiv 2602.06036), and DSpark's two heads.

    context   feature 0 ... feature n-1    one of each committed token: norm(fc(target's layers))
    block     last, mask, mask, mask       positions n, n+1, ...
    drafts          d1    d2    d3         DFlash: a mask says its own token
              d1    d2    d3    d4         DSpark: each slot says the token after it

Every layer is one of Qwen3. The context enters it as keys and values, made of the feature by the
layer's own projections; they do not depend on the block, and are cached. Inside the block all slots
see each other. The embeddings and the head are the target's, or those of the folder.

DSpark (arXiv 2607.05147) adds, as options of the same head,

- a Markov head: logits of draft i += W2 · W1[draft i-1], of low rank, so that drafts follow from
  those before them although the block was read once;
- a confidence head: sigmoid(w · [hidden i, W1[draft i-1]] + b), how likely draft i is kept. It
  knows the draft before, never draft i itself.

A folder holds config.json and safetensors, in the layout of published heads:

```
  fc.weight                       [D, L·D]    fuses the target's layers
  hidden_norm.weight              [D]         norms what is fused
  layers.{i}.*                                as in a Qwen3, for i < num_hidden_layers
  norm.weight                     [D]
  embed_tokens.weight             [V, D]      if the embedding is not the target's
  lm_head.weight                  [U, D]      if the head is not the target's
  mask_embedding                  [D]         if no token of the vocabulary is the mask
  markov_head.markov_w1.weight    [V, R]      and markov_w2 [U, R], if there is a Markov head
  confidence_head.proj.weight     [1, D+R]    and bias [1], if there is a confidence head
  d2t [U], t2d [V]                            if it proposes some tokens only; see `eagle_head`
```

The layouts differ in config.json: z-lab's (`DFlashDraftModel`, with `dflash_config`), DeepSeek's
(`Qwen3DSparkModel`), and that of vLLM's speculators (`speculators_model_type`). The last counts the
target's layers from 1 (`aux_hidden_state_layer_ids`), the others from 0 (`target_layer_ids`).
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from jspec.common.errors import InputError
from jspec.common.typing import Params, RowTokens
from jspec.drafters.eagle_layouts import VERIFIER_TENSORS
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
from jspec.kernels import rotate_heads
from jspec.models.cache import KVCache, causal_mask
from jspec.models.config import DecoderConfig
from jspec.models.decoder import Block, apply_layer, init_cache
from jspec.models.families.hf_config import from_hf_config, to_hf_config
from jspec.models.layers import (
    RMSNorm,
    finish_logits,
    head_kernel,
    linear,
    look_up,
    rope_cos_sin,
    scaled,
)
from jspec.weights.parameter import Parameter, one_tensor
from jspec.weights.safetensors_file import FloatTensors
from jspec.weights.tensor_names import block_tensors


@dataclasses.dataclass(frozen=True)
class DflashConfig(FeatureHead):
    """The shape of a head; without a `mask_id` an embedding of its own stands for a draft.

    Attributes:
      block_size: slots of a block at most, that of the newest token included.
      says_next: whether a slot predicts the token after its own position, as in DSpark.
      markov_rank: of the Markov head; 0 if there is none.
      has_confidence: whether it has a confidence head.
      confidence_reads_markov: whether that reads the embedding of the draft before.
      has_head: whether it has its own projection onto the vocabulary.
      causal_layers: layers in which a slot of the block sees no later slot.
    """

    _: dataclasses.KW_ONLY
    block_size: int
    says_next: bool = False
    markov_rank: int = 0
    has_confidence: bool = False
    confidence_reads_markov: bool = False
    has_head: bool = False
    causal_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("block_size", self.block_size), ("markov_rank", self.markov_rank)):
            least = 2 if name == "block_size" else 0
            if type(value) is not int or value < least:
                raise ValueError(
                    f"expected {name} as a whole number of at least {least}, got {value!r}"
                )
        if not self.feature_layers:
            raise ValueError("expected the layers of the target that the head reads, got none")
        if self.is_cut and not self.has_head:
            raise ValueError("expected a tensor lm_head.weight with draft_vocab_size, found none")
        if self.confidence_reads_markov and not self.markov_rank:
            raise ValueError("expected markov_rank above 0 with confidence_head_with_markov, got 0")

    @property
    def is_cut(self) -> bool:
        """Whether it proposes some of the target's tokens only."""
        return self.layer.vocab_size < self.target_vocab_size

    @property
    def most_drafts(self) -> int:
        """The most drafts of a block."""
        return self.block_size if self.says_next else self.block_size - 1

    @property
    def confidence_dim(self) -> int:
        """Inputs of the confidence head."""
        return self.layer.embed_dim + self.markov_rank * self.confidence_reads_markov

    def num_slots(self, num_drafts: int) -> int:
        """Returns the slots of a block with this number of drafts."""
        return num_drafts if self.says_next else num_drafts + 1


def fuse(
    config: DflashConfig, params: Params, hidden: Float[Array, "b t l d"]
) -> Float32[Array, "b t d"]:
    """Returns one feature a token of the outputs of the target's `feature_layers`, normed."""
    b, t = hidden.shape[:2]
    fused = linear(hidden.reshape(b, t, -1), params["fc"])
    return _norm(config, params["feature_norm"], fused)


def _norm(
    config: DflashConfig, params: Params, inputs: Float[Array, "b t d"]
) -> Float32[Array, "b t d"]:
    norm = RMSNorm(config.layer.norm_epsilon)
    return norm.apply({"params": params}, inputs)  # type: ignore[return-value]


def read_context(
    config: DflashConfig,
    params: Params,
    features: Float[Array, "b t d"],
    cache: KVCache,
    *,
    positions: Int[Array, "b t"] | None = None,
) -> KVCache:
    """Returns the cache with the keys and values of the next tokens' features; none is committed.

    Token i has slot i and by default that position. See `fuse` for the features.
    """
    cfg, features = config.layer, features.astype(jnp.float32)
    if positions is None:
        positions = cache.length[:, None] + jnp.arange(features.shape[1])
    cos, sin = rope_cos_sin(cfg, positions)
    for index in range(cfg.num_layers):
        attention = params[f"layers_{index}"]["attention"]
        # Queries of a context are never asked. A slice, as keys and values lie after them.
        heads = linear(features, attention["qkv"][:, cfg.num_groups :])
        if cfg.qkv_bias:
            heads += attention["qkv_bias"][:, cfg.num_groups :].astype(jnp.float32)
        keys = heads[:, :, :, :1]
        if cfg.qk_norm is not None:
            flat = keys.reshape(keys.shape[0], -1, cfg.head_dim)
            keys = _norm(config, attention["key_norm"], flat).reshape(keys.shape)
        # The key again, in the place of the query heads that `rotate_heads` expects.
        parts = jnp.concatenate([keys, keys, heads[:, :, :, 1:]], axis=3)
        _, keys, values = rotate_heads(parts, cos, sin)
        cache = cache.with_layer(index, cache.layer(index).write(keys, values))
    return cache


def read_block(
    config: DflashConfig,
    params: Params,
    embedded: Float[Array, "b t d"],
    cache: KVCache,
    *,
    positions: Int[Array, "b t"] | None = None,
    visible: Bool[Array, "b t s"] | None = None,
) -> tuple[Float32[Array, "b t d"], KVCache]:
    """Runs the layers on a block, see `embed_block`; returns the normed outputs and the cache.

    The committed slots are the context's. The block is written after them, and not committed. By
    default it has the positions after the context, and sees `visible_slots`.
    """
    cfg, num_slots = config.layer, embedded.shape[1]
    if positions is None:
        positions = cache.length[:, None] + jnp.arange(num_slots)
    rope, x = rope_cos_sin(cfg, positions), embedded.astype(jnp.float32)
    for index in range(cfg.num_layers):
        mask = visible_slots(config, cache, index, num_slots) if visible is None else visible
        inputs = x, rope, mask, cache.layer(index)
        x, layer = apply_layer(Block(cfg), cfg, 0, params[f"layers_{index}"], *inputs)
        cache = cache.with_layer(index, layer)
    return _norm(config, params["final_norm"], x), cache


def visible_slots(
    config: DflashConfig, cache: KVCache, index: int, num_slots: int
) -> Bool[Array, "b t s"]:
    """Returns what each slot of a block sees in layer `index`: the context, and its block."""
    window, causal = config.layer.window_of(index), causal_mask(num_slots)
    if index in config.causal_layers:
        return cache.visible(causal, window)
    everything = cache.visible(jnp.ones_like(causal))
    if window is None:
        return everything
    block = everything & ~cache.visible(jnp.zeros_like(causal))
    return cache.visible(causal, window) | block


def embed_block(
    config: DflashConfig, params: Params, target: Params, tokens: RowTokens, num_slots: int
) -> Float[Array, "b t d"]:
    """Returns the embeddings of the block [token, mask, mask, ...] of each row."""
    table = params["embedding"] if config.has_embedding else target["embedding"]
    if config.mask_id is not None:
        masks = jnp.full([tokens.shape[0], num_slots - 1], config.mask_id, jnp.int32)
        block = look_up(table, jnp.concatenate([tokens[:, None], masks], axis=1))
    else:
        first = look_up(table, tokens[:, None])
        shape = tokens.shape[0], num_slots - 1, first.shape[-1]
        masks = jnp.broadcast_to(params["mask"].astype(first.dtype), shape)
        block = jnp.concatenate([first, masks], axis=1)
    return scaled(block, config.layer.embedding_scale)


def block_logits(
    config: DflashConfig,
    params: Params,
    target_config: DecoderConfig,
    target: Params,
    hidden: Float32[Array, "b t d"],
) -> Float32[Array, "b t u"]:
    """Returns the logits of what the slots say, among the tokens that the head can propose."""
    head = params["head"] if config.has_head else head_kernel(target_config, target)
    return finish_logits(config.layer, linear(hidden, head))


def markov_embedding(params: Params, tokens: Int[Array, "b k"]) -> Float[Array, "b k r"]:
    """Returns the Markov head's embeddings of the drafts before."""
    return look_up(params["markov"]["embedding"], tokens)


def markov_bias(params: Params, embedded: Float[Array, "b k r"]) -> Float32[Array, "b k u"]:
    """Returns what the Markov head adds to the logits after drafts with these embeddings."""
    return linear(embedded, params["markov"]["kernel"])


def confidence_of(
    config: DflashConfig,
    params: Params,
    hidden: Float[Array, "b d"],
    before: Float[Array, "b r"] | None,
) -> Float32[Array, "b"]:
    """Returns how likely drafts are kept, given those before them; see `markov_embedding`."""
    inputs = hidden.astype(jnp.float32)
    if config.confidence_reads_markov:
        assert before is not None
        inputs = jnp.concatenate([inputs, before.astype(jnp.float32)], axis=-1)
    head = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params["confidence"])
    # One output: a sum in float32 is cheaper than a product, and as exact.
    return jax.nn.sigmoid(jnp.sum(inputs * head["kernel"][0], axis=-1) + head["bias"][0])


def init_dflash_params(config: DflashConfig, rng_key: Array) -> dict[str, Any]:
    """Returns a head without training that can propose the first tokens; the key is consumed.

    Its parameters: `fc` [d l·d], `feature_norm`, `layers_0`, `layers_1`, ... (see `Block`),
    `final_norm`; and where the config has them `ids` [u], the target's ids of the tokens that it
    can propose, `mask` [d], `embedding` [v d], `head` [u d], `markov` (`embedding` [v r], `kernel`
    [u r]) and `confidence` (`kernel` [1 i], `bias` [1]). The Markov head begins as none.
    """
    cfg, dim = config.layer, config.layer.embed_dim
    keys = iter(jax.random.split(rng_key, cfg.num_layers + 5))
    params: dict[str, Any] = {"fc": 0.02 * jax.random.normal(next(keys), (dim, config.feature_dim))}
    # Flax only needs shapes here; nothing in the cache is kept.
    cache = init_cache(cfg, batch_size=1, capacity=2, dtype=jnp.float32)
    x, rope = jnp.zeros([1, 1, dim]), rope_cos_sin(cfg, jnp.zeros([1, 1], jnp.int32))
    inputs = x, rope, cache.visible(causal_mask(1)), cache.layer(0), 0
    for index in range(cfg.num_layers):
        params[f"layers_{index}"] = Block(cfg).init(next(keys), *inputs)["params"]
    params |= {name: {"scale": jnp.ones([dim])} for name in ("feature_norm", "final_norm")}
    small = jax.nn.initializers.normal(0.02)
    if config.is_cut:
        params["ids"] = jnp.arange(cfg.vocab_size, dtype=jnp.int32)
    if config.mask_id is None:
        params["mask"] = small(next(keys), (dim,))
    if config.has_embedding:
        params["embedding"] = small(next(keys), (config.target_vocab_size, dim))
    if config.has_head:
        params["head"] = small(next(keys), (cfg.vocab_size, dim))
    if config.markov_rank:
        shape = config.target_vocab_size, config.markov_rank
        kernel = jnp.zeros([cfg.vocab_size, config.markov_rank])
        params["markov"] = {"embedding": small(next(keys), shape), "kernel": kernel}
    if config.has_confidence:
        kernel = jnp.zeros([1, config.confidence_dim])
        params["confidence"] = {"kernel": kernel, "bias": jnp.zeros([1])}
    return params


def dflash_rules(config: DflashConfig) -> list[Parameter]:
    """Returns the table from a head's tensors to its parameters, `ids` apart."""
    cfg, wide = config.layer, (config.layer.embed_dim,)
    rows, cut = (config.target_vocab_size,), (cfg.vocab_size,)
    rules = [
        one_tensor(("fc",), "fc.weight", (*wide, config.feature_dim)),
        one_tensor(("feature_norm", "scale"), "hidden_norm.weight", wide),
        one_tensor(("final_norm", "scale"), "norm.weight", wide),
    ]
    for index in range(cfg.num_layers):
        rules += block_tensors(cfg, (f"layers_{index}",), f"layers.{index}")
    if config.mask_id is None:
        rules.append(one_tensor(("mask",), _MASK, wide))
    if config.has_embedding:
        rules.append(one_tensor(("embedding",), _EMBEDDING, (*rows, *wide)))
    if config.has_head:
        rules.append(one_tensor(("head",), _HEAD, (*cut, *wide)))
    if config.markov_rank:
        name, rank = "markov_head.markov_w", (config.markov_rank,)
        rules.append(one_tensor(("markov", "embedding"), f"{name}1.weight", (*rows, *rank)))
        rules.append(one_tensor(("markov", "kernel"), f"{name}2.weight", (*cut, *rank)))
    if config.has_confidence:
        name, inputs = "confidence_head.proj", config.confidence_dim
        rules.append(one_tensor(("confidence", "kernel"), f"{name}.weight", (1, inputs)))
        rules.append(one_tensor(("confidence", "bias"), f"{name}.bias", (1,)))
    return rules


_FILE = "model.safetensors"
_MASK, _EMBEDDING, _HEAD = "mask_embedding", "embed_tokens.weight", "lm_head.weight"
_DFLASH, _DSPARK = "DFlashDraftModel", "Qwen3DSparkModel"
_ARCHITECTURES = (_DFLASH, _DSPARK, "DFlashSpeculator", "DSparkSpeculator")
_TYPE, _LAYER, _GROUP = "speculators_model_type", "transformer_layer_config", "dflash_config"
_QWEN3 = "Qwen3ForCausalLM"

# Of training, or of other programs: nothing that is computed here depends on them.
_IGNORED_KEYS = frozenset({
    "auto_map", "auf", "ce_loss_alpha", "confidence_head_alpha", "emb_dim", "gru_hidden_dim",
    "has_no_defaults_at_init", "l1_loss_alpha", "lambda_base_decay_ratio", "lambda_base_start",
    "loss_decay_gamma", "max_anchors", "num_anchors", "pure_draft_prefix_len",
    "speculators_config", "speculators_version", _TYPE,
})  # fmt: skip
# Keys that would change the computation, and the only values that are honoured.
_REQUIRED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "projector_type": ("dflash", None),
    "markov_head_type": ("vanilla", None),
    "use_aux_hidden_state": (True,),
    "use_swa": (False, None),
    "attention_sink_bias": (False, None),
    "add_swa_attention_sink_bias": (False, None),
    "fc_layernorm": (False, None),
    "is_neox_style": (True,),
}
# What transformers leaves out of a Qwen3's config where it is the default, as speculators write it.
_QWEN3_DEFAULTS = {
    "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "head_dim": 128,
}  # fmt: skip


def load_dflash(folder: pathlib.Path, target: DecoderConfig, dtype: Any) -> LoadedHead:
    """Loads a head that was trained for a target.

    Raises:
      InputError: anything missing, damaged, of another shape, or of another target.
    """
    path = folder / "config.json"
    raw = _published(path, read_any_config(folder, "a head of DFlash or DSpark"))
    stored = read_stored(folder / _FILE)
    stored = {name: tensor for name, tensor in stored.items() if name not in VERIFIER_TENSORS}
    try:
        config = _read_config(raw, stored.keys())
    except (ValueError, TypeError) as error:
        raise InputError(f"{path}: {error}") from None
    config.check_target(folder, target)
    if config.mask_id is not None:
        stored.pop(_MASK, None)  # a placeholder, where a token is the mask
    ids = in_order(stored, read_ids(folder, stored, config))
    params = pack_params(folder, FloatTensors(stored), dflash_rules(config), dtype)
    if config.is_cut:
        params["ids"] = jax.device_put(ids)
    return LoadedHead(config, params, str(folder))


def _published(path: pathlib.Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of a published config.json in one object, whoever wrote it."""
    if _TYPE in raw:
        if raw[_TYPE] not in ("dflash", "dspark"):
            raise InputError(f"{path}: expected {_TYPE} dflash or dspark, got {raw[_TYPE]!r}")
        layer = raw.get(_LAYER)
        if not isinstance(layer, dict):
            raise InputError(f"{path}: expected {_LAYER} to be an object, got {layer!r}")
        head = {key: value for key, value in raw.items() if key != _LAYER}
        return _QWEN3_DEFAULTS | layer | head | {"model_type": layer.get("model_type", "qwen3")}
    names = raw.get("architectures")
    if not isinstance(names, list) or not set(names) & set(_ARCHITECTURES):
        raise InputError(
            f"{path}: expected a head of DFlash or DSpark, with architectures among "
            f"{', '.join(_ARCHITECTURES)}; got {names!r}"
        )
    group = raw.get(_GROUP) or {}
    if not isinstance(group, dict):
        raise InputError(f"{path}: expected {_GROUP} to be an object, got {group!r}")
    # What is said at the top goes before the group.
    return group | {key: value for key, value in raw.items() if key != _GROUP}


def _read_config(raw: dict[str, Any], tensors: Any) -> DflashConfig:
    """Returns the config of a head; `tensors` are the names of what is stored."""
    names = raw.pop("architectures", None) or []
    is_dspark = any("DSpark" in name for name in names) or raw.get(_TYPE) == "dspark"
    for key, values in _REQUIRED_VALUES.items():
        if (value := raw.pop(key, values[0])) not in values:
            raise ValueError(f"expected {key} to be {values[0]!r}, got {value!r}")
    raw = {key: value for key, value in raw.items() if key not in _IGNORED_KEYS}
    width = raw.pop("target_hidden_size", None)
    if width is not None and width != raw.get("hidden_size"):
        raise ValueError(f"expected hidden_size of target_hidden_size, {width}, got another")
    size = raw.get("vocab_size")
    fields: dict[str, Any] = {
        "feature_layers": _read_layers(raw),
        "block_size": raw.pop("block_size", None),
        "mask_id": raw.pop("mask_token_id", None),
        "markov_rank": raw.pop("markov_rank", None) or 0,
        "has_confidence": bool(raw.pop("enable_confidence_head", False)),
        "confidence_reads_markov": bool(raw.pop("confidence_head_with_markov", False)),
        "target_num_layers": raw.pop("num_target_layers", None) or 0,
    }
    says_next, shift = raw.pop("sample_from_anchor", None), raw.pop("shift_label", None)
    fields["says_next"] = is_dspark if says_next is None else bool(says_next)
    if shift and not fields["says_next"]:
        raise ValueError("expected shift_label false, or with sample_from_anchor, got true")
    if fields["mask_id"] is None and _MASK not in tensors:
        raise ValueError(f"expected mask_token_id, or a tensor {_MASK}, found neither")
    if not is_dspark and _MASK in tensors:
        fields["mask_id"] = None  # the embedding takes the token's place
    fields["confidence_reads_markov"] &= fields["has_confidence"]
    num_drafts = raw.pop("draft_vocab_size", None) or size
    fields["causal_layers"] = _read_causal(raw)
    scales = {
        "embedding_scale": raw.pop("input_embedding_scale", None) or 1.0,
        "logits_scale": raw.pop("output_multiplier", None) or raw.pop("logit_scale", None) or 1.0,
        "logits_softcap": raw.pop("final_logit_softcapping", None) or None,
    }
    shape = from_hf_config(raw | {"architectures": [_QWEN3]})
    layer = dataclasses.replace(shape, vocab_size=num_drafts, tie_embeddings=False, **scales)
    fields |= {"has_embedding": _EMBEDDING in tensors, "has_head": _HEAD in tensors}
    return DflashConfig(layer, shape.vocab_size, **fields)


def _read_layers(raw: dict[str, Any]) -> tuple[int, ...]:
    """Takes the target's layers out of a config.json; 0 is the embedding, i the i-th block."""
    ids, outputs = raw.pop("target_layer_ids", None), raw.pop("aux_hidden_state_layer_ids", None)
    given = outputs if ids is None else ids
    is_list = isinstance(given, list) and all(type(layer) is int for layer in given)
    if not is_list or not given:
        raise ValueError(f"expected target_layer_ids as a list of layers, got {given!r}")
    # The first counts blocks from 0, with -1 for the embedding; the other counts outputs.
    return tuple(layer + (ids is not None) for layer in given)


def _read_causal(raw: dict[str, Any]) -> tuple[int, ...]:
    """Takes out of a config.json in which layers a slot sees no later one; see vLLM's DFlash."""
    depth, kinds = raw.get("num_hidden_layers"), raw.get("layer_types") or []
    is_causal, causal = raw.pop("is_causal", None), raw.pop("causal", None)
    is_causal = causal if is_causal is None else is_causal
    sees_later = raw.pop("sliding_window_non_causal", False)
    if type(depth) is not int:
        return ()  # which is refused later, by name
    if is_causal is not None:
        return tuple(range(depth)) if is_causal else ()
    sliding = [index for index, kind in enumerate(kinds) if kind == "sliding_attention"]
    return () if sees_later else tuple(sliding)


def save_dflash(folder: pathlib.Path, config: DflashConfig, params: dict[str, Any]) -> None:
    """Writes a head; the folder appears when it is complete.

    Raises:
      InputError: the folder exists or cannot be written.
    """
    cfg = config.layer
    tensors = written_ids(config, np.asarray(params["ids"])) if config.is_cut else {}
    tensors |= unpack_params(dflash_rules(config), params)
    is_dspark = bool(config.markov_rank or config.has_confidence)
    unscaled = {"embedding_scale": 1.0, "logits_scale": 1.0, "logits_softcap": None}
    plain = dataclasses.replace(config.plain_layer, **unscaled)
    text = to_hf_config(plain) | {
        "architectures": [_DSPARK if is_dspark else _DFLASH],
        "block_size": config.block_size,
        "mask_token_id": config.mask_id,
        "target_layer_ids": [layer - 1 for layer in config.feature_layers],
        "num_target_layers": config.target_num_layers or None,
        "draft_vocab_size": cfg.vocab_size,
        "sample_from_anchor": config.says_next,
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": config.has_confidence,
        "confidence_head_with_markov": config.confidence_reads_markov,
        "input_embedding_scale": cfg.embedding_scale,
        "output_multiplier": cfg.logits_scale,
        "final_logit_softcapping": cfg.logits_softcap,
        "sliding_window_non_causal": not config.causal_layers,
        "dtype": str(params["fc"].dtype),
    }
    write_head(folder, _FILE, tensors, text)

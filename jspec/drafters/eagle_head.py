"""The head of EAGLE-3 (arXiv 2503.01840): a decoder layer that continues the target's features.

    features of three layers of the target at token i  -- fc -->  feature i   [d]
    feature i, embedding of token i+1  -- layer -->  hidden i  -- norm, head -->  probs of token i+2

Where the target has not been yet, `hidden` takes the feature's place: that is how a chain of drafts
is made. The embedding is the target's own.

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

What vLLM's `speculators` write is read as well, and written: config.json names the target.

```
  architectures                      ["Eagle3Speculator"]
  speculators_model_type             "eagle3"
  speculators_config                 algorithm, proposal_methods, default_proposal_method, verifier
  transformer_layer_config           the layer's shape; its vocabulary is the target's
  draft_vocab_size, norm_before_residual, eagle_aux_hidden_state_layer_ids
```

Its tensors have `layers.0.` for `midlayer.`; the embedding is the target's, and not there. vLLM
reads the config in transformers_utils/configs/speculators/base.py and algos.py, the tensors in
model_executor/models/llama_eagle3.py. Where `norm_before_residual` is true, as vLLM takes it to be
if it is missing, the layer adds to the normed feature, not to the feature itself.

Heads of EAGLE-3.1 (arXiv 2605.09992) have `norm_before_fc`, with a tensor input_norm.weight [3·D],
and `norm_output`: what takes a feature's place is the output after `norm`.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Float32, Int

from jspec.common.errors import InputError
from jspec.common.json_lines import read_json
from jspec.common.typing import Params
from jspec.drafters.head_folder import (
    LoadedHead,
    check_target,
    pack_params,
    read_any_config,
    read_stored,
    unpack_params,
    write_head,
)
from jspec.models.cache import KVCache, causal_mask
from jspec.models.config import DecoderConfig
from jspec.models.decoder import apply_layer, init_cache
from jspec.models.families import find_family
from jspec.models.families.hf_config import from_hf_config, to_hf_config
from jspec.models.families.llama import LLAMA
from jspec.models.layers import Attention, FeedForward, RMSNorm, kernel_param, linear, rope_cos_sin
from jspec.weights.parameter import Parameter, Path, one_tensor
from jspec.weights.quantize import is_kernel, quantize
from jspec.weights.safetensors_file import FloatTensors
from jspec.weights.tensor_names import attention_tensors, mlp_tensors


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """The shape of a head.

    Attributes:
      layer: the shape of its decoder layer; `vocab_size` counts the tokens that it can propose, and
        `embed_dim` is the target's.
      target_vocab_size: rows of the target's embedding.
      feature_layers: the layers of the target whose outputs are its features: 0 is the embedding,
        i the output of the i-th block.
      target_num_layers: of the target; 0 if it is not known.
      has_input_norm: whether the target's outputs are normed, together, before they are fused.
      has_output_norm: whether what takes a feature's place is the head's output after its norm.
      has_residual_norm: whether the layer adds to the feature after its norm.
    """

    layer: DecoderConfig
    target_vocab_size: int
    feature_layers: tuple[int, ...]
    target_num_layers: int = 0
    has_input_norm: bool = False
    has_output_norm: bool = False
    has_residual_norm: bool = False

    def __post_init__(self) -> None:
        # The cache and the tensors' names are those of a single layer.
        if self.layer.num_layers != 1:
            raise ValueError(f"expected a head of one layer, got {self.layer.num_layers}")
        if self.layer.vocab_size > self.target_vocab_size:
            raise ValueError(
                f"expected at most the target's {self.target_vocab_size} tokens, got "
                f"{self.layer.vocab_size}"
            )

    @property
    def feature_dim(self) -> int:
        """Width of the features before they are fused."""
        return len(self.feature_layers) * self.layer.embed_dim


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
    """The layer, the norm and the head."""

    config: EagleConfig

    @nn.compact
    def __call__(
        self,
        embedded: Float[Array, "b t d"],
        features: Float[Array, "b t d"],
        cache: KVCache,
        logits_at: Int[Array, "b"] | None = None,
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
        inputs = x, rope, visible, cache, pair
        if self.is_initializing():
            layer = EagleLayer(cfg)
            nn.share_scope(self, layer)  # published heads have no name between
            x, cache = layer(*inputs)
        else:
            layer_params = {name: self.get_variable("params", name) for name in EagleLayer.PARTS}
            offset = mask.shape[-1] - num_tokens  # as in `Decoder`
            x, cache = apply_layer(EagleLayer(cfg), cfg, offset, layer_params, *inputs)
        norm = RMSNorm(eps, name="final_norm")
        if self.config.has_output_norm:
            x = norm(x)
        outputs = x
        if logits_at is not None:
            # Before the head: one row of logits is made instead of t.
            outputs = jnp.take_along_axis(x, logits_at[:, None, None], axis=1)
        if not self.config.has_output_norm:
            # `x` goes on without the norm, as it stands for the next feature.
            outputs = norm(outputs)
        head = kernel_param(self, "head", (cfg.vocab_size, cfg.embed_dim))
        return linear(outputs, head), x, cache


def fuse(
    params: Params, features: Float[Array, "b t l d"], epsilon: float = 1e-6
) -> Float32[Array, "b t d"]:
    """Returns one feature a token of the outputs of the target's `feature_layers`, [b t l d].

    `epsilon` is that of the norm before, if there is one.
    """
    b, t = features.shape[:2]
    # Layers side by side, [b t l·d], in the order of `feature_layers`.
    wide = features.reshape(b, t, -1)
    if "input_norm" in params:
        norm = RMSNorm(epsilon)
        wide = norm.apply({"params": params["input_norm"]}, wide.astype(jnp.float32))
    return linear(wide, params["fc"])  # type: ignore[arg-type]


def apply_head(
    config: EagleConfig,
    params: Params,
    embedded: Float[Array, "b t d"],
    features: Float[Array, "b t d"],
    cache: KVCache,
    *,
    logits_at: Int[Array, "b"] | None = None,
    positions: Int[Array, "b t"] | None = None,
    block_mask: Bool[Array, "#b t s"] | None = None,
) -> tuple[Float32[Array, "b l u"], Float32[Array, "b t d"], KVCache]:
    """Runs the head on one block of pairs (feature of token i, embedding of token i + 1).

    Args:
      config: the head's.
      params: see `init_eagle_params`.
      embedded: the target's embeddings of the later tokens.
      features: fused features of the earlier ones, or the head's own outputs for them.
      cache: the head's; pair i has position and slot i.
      logits_at: compute logits at this one index of each row's block only.
      positions: of the pairs; None for a chain.
      block_mask: which pairs of the block each sees; see `ApplyFn`.

    Returns:
      logits: of the tokens after the later ones, among those the head can propose, [b t u] or
        [b 1 u].
      hidden: what takes the place of the later tokens' features, [b t d].
      cache: with the block written and nothing committed.
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

    Its parameters: `input_norm`, if it has one, `fc` [d l·d], `head` (the module's) and `ids` [u],
    the target's ids of the tokens that it can propose.
    """
    shape = config.layer
    head_key, fc_key = jax.random.split(rng_key)
    # Flax only needs shapes here; nothing in the cache is kept.
    cache = init_cache(shape, batch_size=1, capacity=2, dtype=jnp.float32)
    some = jnp.zeros([1, 1, shape.embed_dim], jnp.float32)
    fc = nn.initializers.normal(0.02)(fc_key, (shape.embed_dim, config.feature_dim))
    norm = {"input_norm": {"scale": jnp.ones([config.feature_dim])}}
    return (norm if config.has_input_norm else {}) | {
        "fc": fc,
        "head": EagleHead(config).init(head_key, some, some, cache)["params"],
        "ids": jnp.arange(shape.vocab_size, dtype=jnp.int32),
    }


_FILE = "model.safetensors"
_ARCHITECTURE = "LlamaForCausalLMEagle3"
_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"


def eagle_rules(config: EagleConfig) -> list[Parameter]:
    """Returns the table from a head's tensors to its parameters, `ids` apart."""
    shape, embed = config.layer, (config.layer.embed_dim,)
    norm = one_tensor(("input_norm", "scale"), "input_norm.weight", (config.feature_dim,))
    return [
        *([norm] if config.has_input_norm else []),
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
    config = _read_config(folder, target)
    stored = published_names(read_stored(folder / _FILE))
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


def _read_config(folder: pathlib.Path, target: DecoderConfig) -> EagleConfig:
    path = folder / "config.json"
    try:
        raw = published_config(read_any_config(folder, "a head of EAGLE-3"))
        if "hidden_size" not in raw:
            raise ValueError("expected the config.json of a head of EAGLE-3; it has no hidden_size")
        num_drafts = raw.pop("draft_vocab_size", raw.get("vocab_size"))
        group = raw.get(LAYERS_GROUP)
        if isinstance(group, dict):  # some heads say it there
            raw = {key: group[key] for key in _NORMS if key in group} | raw
        norms = {field: bool(raw.pop(key, False)) for key, field in _NORMS.items()}
        layers, depth = _pop_layers(raw), raw.pop(DEPTH, None) or 0
        # Apart from its input the layer is Llama's, so its config is read as one.
        shape = from_hf_config(raw | {"architectures": ["LlamaForCausalLM"]})
        # The layer's vocabulary is what it proposes; the target's goes to `EagleConfig`.
        layer = dataclasses.replace(shape, vocab_size=num_drafts, tie_embeddings=False)
        layers = default_feature_layers(target.num_layers) if layers is None else tuple(layers)
        config = EagleConfig(layer, shape.vocab_size, layers, depth, **norms)
        is_in_range = all(0 <= int(i) <= target.num_layers for i in layers)
    # An InputError is a ValueError too, and has named the file already.
    except InputError:
        raise
    except (ValueError, TypeError) as error:
        raise InputError(f"{path}: {error}") from None
    sizes = [
        ("width", config.layer.embed_dim, target.embed_dim),
        ("vocabulary", config.target_vocab_size, target.vocab_size),
        ("layers", depth or target.num_layers, target.num_layers),
    ]
    check_target(folder, sizes)
    if not is_in_range:
        raise InputError(f"{folder}: it reads layers {list(layers)}, of {target.num_layers}")
    return config


def _pop_layers(raw: dict[str, Any]) -> list[int] | None:
    """Removes the layers that are read from a config; some heads have them in a group."""
    group = raw.pop(LAYERS_GROUP, None) or {}
    if not isinstance(group, dict):
        raise ValueError(f"expected {LAYERS_GROUP} to be an object, got {group!r}")
    if not group.get("use_aux_hidden_state", True):
        raise ValueError("expected a head that reads hidden states of several layers")
    layers = raw.pop(_LAYERS_KEY, None)
    return group.get(_LAYERS_KEY) if layers is None else layers


def read_ids(folder: pathlib.Path, tensors: dict[str, np.ndarray], config: Any) -> np.ndarray:
    """Takes the mapping out of the tensors; returns the target's id of every draft id, [u].

    `config` is an `EagleConfig`, or has its `layer` and `target_vocab_size`.

    Raises:
      InputError: it is missing, of another size, or names no ids of the target.
    """
    num_drafts = config.layer.vocab_size
    offsets = tensors.pop("d2t", None)
    is_known = tensors.pop("t2d", None)
    if offsets is None:
        if num_drafts != config.target_vocab_size:
            raise InputError(f"{folder}: d2t: missing")
        return np.arange(num_drafts, dtype=np.int32)
    if offsets.shape != (num_drafts,):
        raise InputError(f"{folder}: d2t: expected [{num_drafts}], found {list(offsets.shape)}")
    # `d2t` holds differences, not ids.
    ids = np.arange(num_drafts) + offsets.astype(np.int64)
    if len(np.unique(ids)) < num_drafts or ids.min() < 0 or ids.max() >= config.target_vocab_size:
        raise InputError(f"{folder}: d2t: expected different ids of the target's vocabulary")
    # The two say the same thing twice: where they differ, one is damaged.
    if is_known is not None and not np.array_equal(np.flatnonzero(is_known), np.sort(ids)):
        raise InputError(f"{folder}: d2t and t2d disagree")
    return ids.astype(np.int32)


def in_order(tensors: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Sorts what the tensors have of each token that a head proposes; returns the sorted ids."""
    # Published heads may list their tokens in any order. Of equal logits the first is taken, in the
    # head as in the target: the smallest id's.
    order = np.argsort(ids)
    if not np.array_equal(order, np.arange(len(ids))):
        of_drafts = "lm_head.", "markov_head.markov_w2."
        heads = [name for name in tensors if name.startswith(of_drafts)]
        tensors |= {name: tensors[name][order] for name in heads}
    return ids[order]


def save_eagle(folder: pathlib.Path, config: EagleConfig, params: dict[str, Any]) -> None:
    """Writes a head; the folder appears when it is complete.

    Raises:
      InputError: the folder exists or cannot be written.
    """
    ids = np.asarray(params["ids"])
    is_known = np.zeros([config.target_vocab_size], bool)
    is_known[ids] = True
    tensors = {"d2t": ids.astype(np.int64) - np.arange(len(ids)), "t2d": is_known}
    tensors |= unpack_params(eagle_rules(config), params)
    # In config.json `vocab_size` is the target's, as published heads have it.
    text = to_hf_config(dataclasses.replace(config.layer, vocab_size=config.target_vocab_size)) | {
        "architectures": [_ARCHITECTURE],
        "draft_vocab_size": config.layer.vocab_size,
        _LAYERS_KEY: list(config.feature_layers),
        DEPTH: config.target_num_layers or None,
        **{key: True for key, field in _NORMS.items() if getattr(config, field)},
        "dtype": str(params["fc"].dtype),
    }
    write_head(folder, _FILE, tensors, text)


_TYPE, _LAYER, _NORM = "speculators_model_type", "transformer_layer_config", "norm_before_residual"
# Those of EAGLE-3.1 (arXiv 2605.09992) but for the last one.
_NORMS = {
    "norm_before_fc": "has_input_norm",
    "norm_output": "has_output_norm",
    _NORM: "has_residual_norm",
}
_OWN = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", *_NORMS)
LAYERS_GROUP = "eagle_config"  # in which some published configs have the layers
DEPTH = "target_num_hidden_layers"  # jspec's own key
_PREFIX, _THEIR_PREFIX = "midlayer.", "layers.0."


def save_speculators(
    source: pathlib.Path, output: pathlib.Path, *, target: str, num_draft_tokens: int
) -> None:
    """Writes the head of EAGLE-3 in folder `source` for vLLM.

    Args:
      source: in the layout of `eagle_checkpoint`.
      output: the new folder.
      target: the name or folder by which vLLM finds the target. One that is not on this machine
        is taken for a Llama.
      num_draft_tokens: of vLLM in a round.

    Raises:
      InputError: the source is no head of EAGLE-3; the output exists or cannot be written.
    """
    raw = read_json(source / "config.json")
    raw.pop(DEPTH, None)
    # Some heads have the layers in a group; an entry of their own goes before it.
    entries = (raw.pop(LAYERS_GROUP, None) or {}) | raw
    kept = {name: entries[name] for name in _OWN if name in entries}
    raw = {name: value for name, value in raw.items() if name not in _OWN}
    try:
        layer = from_hf_config(raw | {"architectures": ["LlamaForCausalLM"]})
    except ValueError as error:
        raise InputError(f"{source}: {error}") from None
    if layer.num_layers != 1:
        raise InputError(f"{source}: expected a head of one layer, got {layer.num_layers} layers")
    tensors = {
        name.replace(_PREFIX, _THEIR_PREFIX): tensor
        for name, tensor in FloatTensors(read_stored(source / _FILE)).items()
    }
    if "fc.weight" not in tensors:
        raise InputError(f"{source}: expected a head of EAGLE-3; it has no fc.weight")
    method = {"proposal_type": "greedy", "speculative_tokens": num_draft_tokens}
    text = {
        "architectures": ["Eagle3Speculator"],
        _TYPE: "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method | {"accept_tolerance": 0.0, "verifier_accept_k": 1}],
            "verifier": {"architectures": [_architecture(target)], "name_or_path": target},
        },
        _LAYER: _old_rope(to_hf_config(layer)),
        # Written out, as vLLM takes a missing entry for true.
        _NORM: False,
        "tie_word_embeddings": False,
        "dtype": str(tensors["fc.weight"].dtype),
    }
    write_head(output, _FILE, tensors, text | {"draft_vocab_size": layer.vocab_size} | kept)


def _architecture(target: str) -> str:
    """Returns the architecture of a target in a folder or in the hub's cache; else a Llama's."""
    path = pathlib.Path(target) / "config.json"
    if not path.is_file():
        import huggingface_hub

        try:
            cached = huggingface_hub.try_to_load_from_cache(target, "config.json")
        except ValueError:  # no name that the hub allows
            cached = None
        if not isinstance(cached, str):
            return LLAMA.architecture
        path = pathlib.Path(cached)
    raw = read_json(path)
    try:
        return find_family(raw.get("architectures"), raw.get("model_type")).architecture
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None


def _old_rope(layer: dict[str, Any]) -> dict[str, Any]:
    """Returns a config with RoPE in the spelling that every version of transformers reads."""
    rope = layer.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    scaling = None if rope["rope_type"] == "default" else rope
    return layer | {"rope_theta": theta, "rope_scaling": scaling}


def published_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config.json as published heads have it, also if it is one of `speculators`.

    Raises:
      ValueError: another kind of head, or one with a norm of each layer that it reads.
    """
    if _TYPE not in raw:
        return dict(raw)
    if raw[_TYPE] != "eagle3":
        raise ValueError(f"expected {_TYPE} eagle3, got {raw[_TYPE]!r}")
    if raw.get("fc_norm"):
        raise ValueError("expected fc_norm false: norms of single layers cannot be run here")
    if not isinstance(raw.get(_LAYER), dict):
        raise ValueError(f"expected {_LAYER} to be an object, got {raw.get(_LAYER)!r}")
    # Missing means true to vLLM, so it must mean the same here.
    own = {_NORM: True} | {name: raw[name] for name in _OWN if name in raw}
    return raw[_LAYER] | own


def published_names(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns tensors under the names of published heads."""
    return {
        _PREFIX + name.removeprefix(_THEIR_PREFIX) if name.startswith(_THEIR_PREFIX) else name: one
        for name, one in tensors.items()
    }

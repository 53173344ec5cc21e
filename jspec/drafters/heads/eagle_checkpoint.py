"""Folders with a head of EAGLE-3: config.json and safetensors, in the layout of published heads.

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

What vLLM's `speculators` write is read as well; see `speculators`. A head whose matrices are
int8 (see `safetensors_file`) runs in int8.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np

from jspec.common.errors import InputError
from jspec.drafters.heads.eagle_module import EagleConfig, default_feature_layers
from jspec.drafters.heads.folder import (
    LoadedHead,
    check_target,
    pack_params,
    read_any_config,
    read_stored,
    unpack_params,
    write_head,
)
from jspec.drafters.heads.speculators import DEPTH, LAYERS_GROUP, published_config, published_names
from jspec.models.config import DecoderConfig
from jspec.models.families.hf_config import from_hf_config, to_hf_config
from jspec.weights.quantize import is_kernel, quantize
from jspec.weights.safetensors_file import FloatTensors
from jspec.weights.tensor_names import Parameter, Path, attention_tensors, mlp_tensors, one_tensor

_FILE = "model.safetensors"
_ARCHITECTURE = "LlamaForCausalLMEagle3"
_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"


def eagle_rules(config: EagleConfig) -> list[Parameter]:
    """Returns the table from a head's tensors to its parameters, `ids` apart."""
    shape, embed = config.layer, (config.layer.embed_dim,)
    return [
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
    ids = _in_order(stored, _read_ids(folder, stored, config))
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
        layers, depth = _pop_layers(raw), raw.pop(DEPTH, None) or 0
        # Apart from its input the layer is Llama's, so its config is read as one.
        shape = from_hf_config(raw | {"architectures": ["LlamaForCausalLM"]})
        # The layer's vocabulary is what it proposes; the target's goes to `EagleConfig`.
        layer = dataclasses.replace(shape, vocab_size=num_drafts, tie_embeddings=False)
        layers = default_feature_layers(target.num_layers) if layers is None else tuple(layers)
        config = EagleConfig(layer, shape.vocab_size, layers, depth)
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


def _read_ids(
    folder: pathlib.Path, tensors: dict[str, np.ndarray], config: EagleConfig
) -> np.ndarray:
    """Takes the mapping out of the tensors; returns the target's id of every draft id, [u]."""
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


def _in_order(tensors: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    # Published heads may list their tokens in any order. Of equal logits the first is taken, in the
    # head as in the target: the smallest id's.
    order = np.argsort(ids)
    if not np.array_equal(order, np.arange(len(ids))):
        heads = [name for name in tensors if name.startswith("lm_head.")]
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
        "dtype": str(params["fc"].dtype),
    }
    write_head(folder, _FILE, tensors, text)

"""How published heads of EAGLE-3 and P-EAGLE are written: keys of config.json, tensors' names.

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

Of a P-EAGLE the type is "peagle", a missing `norm_before_residual` means false, and there is
`mask_token_id`.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec.common.errors import InputError
from jspec.common.json_lines import read_json
from jspec.drafters.head_folder import read_stored, write_head
from jspec.models.families.hf_config import find_family, from_hf_config, to_hf_config
from jspec.models.families.llama import LLAMA
from jspec.weights.safetensors_file import FloatTensors

FILE = "model.safetensors"
LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
MASK, EMBEDDING = "mask_hidden", "embed_tokens.weight"
# Of P-EAGLE: the mask's token and the drafts in the spellings of speculators, PARD and vLLM; and
# keys that only matter in training.
_MASK_KEYS = "mask_token_id", "pard_token", "ptd_token_id"
_DEPTH_KEYS = "num_depths", "para_depths"
_PARALLEL = "parallel_drafting"
_OF_TRAINING = (
    "down_sample_ratio", "down_sample_ratio_min", "max_seq_len", "prediction_loss_weight",
    "embed_requires_grad",
)  # fmt: skip
_TYPE, _LAYER, _NORM = "speculators_model_type", "transformer_layer_config", "norm_before_residual"
# All but the last are those of EAGLE-3.1 (arXiv 2605.09992).
NORMS = {
    "norm_before_fc": "has_input_norm",
    "norm_output": "has_output_norm",
    _NORM: "has_residual_norm",
}
_OWN = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", *NORMS)
LAYERS_GROUP = "eagle_config"  # in which some published configs have the layers
DEPTH = "target_num_hidden_layers"  # jspec's own key
# Tensors of the target, of which some folders have a copy that nothing reads.
VERIFIER_TENSORS = ("verifier_lm_head.weight", "verifier_norm.weight")
# Of other programs: nothing that is computed here depends on them. `fc_norm` is looked at apart.
_IGNORED = frozenset({
    "architectures", "auto_map", "dtype", "fc_norm", "has_no_defaults_at_init",
    "speculators_config", "speculators_version", "target_hidden_size", "tie_word_embeddings",
    "torch_dtype", "transformers_version",
})  # fmt: skip
_PREFIX, _THEIR_PREFIX = "midlayer.", "layers.0."


def pop_mask(raw: dict[str, Any]) -> dict[str, Any]:
    """Takes the keys of P-EAGLE out of a config; returns fields of `EagleConfig`."""
    masks = [raw.pop(key, None) for key in _MASK_KEYS]
    depths = [raw.pop(key, None) for key in _DEPTH_KEYS]
    mask_id = next((token for token in masks if token is not None), None)
    if raw.pop(_PARALLEL, False) and mask_id is None:
        raise ValueError(
            f"expected {_MASK_KEYS[0]} or {_MASK_KEYS[-1]} in a P-EAGLE, found neither"
        )
    for key in _OF_TRAINING:
        raw.pop(key, None)
    return {"mask_id": mask_id, "most_drafts": next(filter(None, depths), 0)}


def written_mask(mask_id: int, most_drafts: int) -> dict[str, Any]:
    """Returns the keys that `pop_mask` reads."""
    return {_MASK_KEYS[-1]: mask_id, _DEPTH_KEYS[0]: most_drafts or None}


def pop_layers(raw: dict[str, Any]) -> list[int] | None:
    """Removes the layers that are read from a config; some heads have them in a group."""
    group = raw.pop(LAYERS_GROUP, None) or {}
    if not isinstance(group, dict):
        raise ValueError(f"expected {LAYERS_GROUP} to be an object, got {group!r}")
    if not group.get("use_aux_hidden_state", True):
        raise ValueError("expected a head that reads hidden states of several layers")
    layers = raw.pop(LAYERS_KEY, None)
    return group.get(LAYERS_KEY) if layers is None else layers


def save_speculators(
    source: pathlib.Path, output: pathlib.Path, *, target: str, num_draft_tokens: int
) -> None:
    """Writes the head of EAGLE-3 or P-EAGLE in folder `source` for vLLM, into a new folder.

    `target` is the name or folder by which vLLM finds the target. One that is not on this machine
    is taken for a Llama. vLLM drafts `num_draft_tokens` a round.

    Raises:
      InputError: the source is no head of EAGLE-3; the output exists or cannot be written.
    """
    raw = read_json(source / "config.json")
    raw.pop(DEPTH, None)
    # Some heads have the layers in a group; an entry of their own goes before it.
    entries = (raw.pop(LAYERS_GROUP, None) or {}) | raw
    kept = {name: entries[name] for name in _OWN if name in entries}
    raw = {name: value for name, value in raw.items() if name not in _OWN}
    mask = pop_mask(raw)
    try:
        layer = from_hf_config(raw | {"architectures": ["LlamaForCausalLM"]})
    except ValueError as error:
        raise InputError(f"{source}: {error}") from None
    kind = "eagle3" if mask["mask_id"] is None else "peagle"
    if layer.num_layers != 1 and kind == "eagle3":
        raise InputError(f"{source}: expected a head of one layer, got {layer.num_layers} layers")
    tensors = {
        name.replace(_PREFIX, _THEIR_PREFIX): tensor
        for name, tensor in FloatTensors(read_stored(source / FILE)).items()
    }
    if "fc.weight" not in tensors:
        raise InputError(f"{source}: expected a head of EAGLE-3; it has no fc.weight")
    method = {"proposal_type": "greedy", "speculative_tokens": num_draft_tokens}
    text = {
        "architectures": ["Eagle3Speculator" if kind == "eagle3" else "PEagleSpeculator"],
        _TYPE: kind,
        "speculators_config": {
            "algorithm": kind,
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
    if kind == "peagle":
        text[_MASK_KEYS[0]] = mask["mask_id"]
        text |= {_DEPTH_KEYS[0]: mask["most_drafts"]} if mask["most_drafts"] else {}
    write_head(output, FILE, tensors, text | {"draft_vocab_size": layer.vocab_size} | kept)


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
    if raw[_TYPE] not in ("eagle3", "peagle"):
        raise ValueError(f"expected {_TYPE} eagle3 or peagle, got {raw[_TYPE]!r}")
    if raw.get("fc_norm"):
        raise ValueError("expected fc_norm false: norms of single layers cannot be run here")
    if not isinstance(raw.get(_LAYER), dict):
        raise ValueError(f"expected {_LAYER} to be an object, got {raw.get(_LAYER)!r}")
    is_parallel = raw[_TYPE] == "peagle"
    read = (*_OWN, *_MASK_KEYS, *_DEPTH_KEYS)
    strangers = raw.keys() - {*read, *_OF_TRAINING, *_IGNORED, _TYPE, _LAYER}
    if strangers:
        raise ValueError(f"unknown config keys: {', '.join(sorted(strangers))}")
    # What a missing key means to vLLM it must mean here, too.
    fields = {_NORM: not is_parallel} | {name: raw[name] for name in read if name in raw}
    return raw[_LAYER] | fields | ({_PARALLEL: True} if is_parallel else {})


def published_names(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns tensors under the names of published heads, less those that only training reads."""
    named = {
        _PREFIX + name.removeprefix(_THEIR_PREFIX) if name.startswith(_THEIR_PREFIX) else name: one
        for name, one in tensors.items()
        if name not in VERIFIER_TENSORS
    }
    if MASK in named:  # some have two axes
        named[MASK] = named[MASK].reshape(1, 1, -1)
    return named

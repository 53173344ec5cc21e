"""A head of EAGLE-3 as vLLM's `speculators` write it: config.json names its target.

```
  architectures                      ["Eagle3Speculator"]
  speculators_model_type             "eagle3"
  speculators_config                 algorithm, proposal_methods, default_proposal_method, verifier
  transformer_layer_config           the layer's shape; its vocabulary is the target's
  draft_vocab_size, norm_before_residual, eagle_aux_hidden_state_layer_ids
```

The tensors are those of `eagle_checkpoint`, with `layers.0.` for `midlayer.`; the embedding is the
target's, and not there. vLLM reads the config in transformers_utils/configs/speculators/base.py and
algos.py, the tensors in model_executor/models/llama_eagle3.py. Where `norm_before_residual` is
true, as vLLM takes it to be if it is missing, the layer adds to the normed feature, not to the
feature itself: another head than ours.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec.common.errors import InputError
from jspec.common.json_lines import read_json
from jspec.drafters.heads.folder import read_stored, write_head
from jspec.models.families import find_family
from jspec.models.families.hf_config import from_hf_config, to_hf_config
from jspec.models.families.llama import LLAMA
from jspec.weights.safetensors_file import FloatTensors

_FILE = "model.safetensors"
_TYPE, _LAYER, _NORM = "speculators_model_type", "transformer_layer_config", "norm_before_residual"
_OWN = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
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
    own = {name: entries[name] for name in _OWN if name in entries}
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
    write_head(output, _FILE, tensors, text | {"draft_vocab_size": layer.vocab_size} | own)


def _architecture(target: str) -> str:
    """Returns the architecture of a target in a folder or in the hub's cache; else a Llama's."""
    path = pathlib.Path(target) / "config.json"
    if not path.is_file():
        import huggingface_hub

        try:
            found = huggingface_hub.try_to_load_from_cache(target, "config.json")
        except ValueError:  # no name that the hub allows
            found = None
        if not isinstance(found, str):
            return LLAMA.architecture
        path = pathlib.Path(found)
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
      ValueError: another kind of head, or one whose layer adds to the normed feature.
    """
    if _TYPE not in raw:
        return dict(raw)
    if raw[_TYPE] != "eagle3":
        raise ValueError(f"expected {_TYPE} eagle3, got {raw[_TYPE]!r}")
    # Missing means true to vLLM, so it must mean the same here.
    if raw.get(_NORM, True):
        raise ValueError(f"expected {_NORM} false: such heads cannot be run here")
    if not isinstance(raw.get(_LAYER), dict):
        raise ValueError(f"expected {_LAYER} to be an object, got {raw.get(_LAYER)!r}")
    return raw[_LAYER] | {name: raw[name] for name in _OWN if name in raw}


def published_names(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns tensors under the names of published heads."""
    return {
        _PREFIX + name.removeprefix(_THEIR_PREFIX) if name.startswith(_THEIR_PREFIX) else name: one
        for name, one in tensors.items()
    }

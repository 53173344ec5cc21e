"""The one table that relates Hugging Face tensors to jspec's parameters.

Every checkpoint format is read as Hugging Face tensors, each placed into a slice of one parameter:

```
  layers_3/attention/qkv [K, G+2, H, D]
     [:, :G]   <- model.layers.3.self_attn.q_proj.weight [N·H, D]   (query head n = k·G + g)
     [:, G]    <- model.layers.3.self_attn.k_proj.weight [K·H, D]
     [:, G+1]  <- model.layers.3.self_attn.v_proj.weight [K·H, D]
```

A slice followed by a reshape can be read in both directions, so the table is its own inverse.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec.models.config import LlamaConfig

Path = tuple[str, ...]
Shape = tuple[int, ...]

_EVERYTHING = (Ellipsis,)


@dataclasses.dataclass(frozen=True)
class Part:
    """One Hugging Face tensor and its place in a parameter.

    Attributes:
      name: the tensor's name in the checkpoint.
      shape: the tensor's shape there.
      index: the parameter's slice that holds it, elements in the same order.
    """

    name: str
    shape: Shape
    index: tuple[Any, ...] = _EVERYTHING


@dataclasses.dataclass(frozen=True)
class Rule:
    """One parameter and the tensors that fill it, each element exactly once.

    Attributes:
      path: the parameter's place in the nested dict.
      shape: its shape.
      parts: the tensors.
    """

    path: Path
    shape: Shape
    parts: tuple[Part, ...]

    def pack(self, tensors: Mapping[str, np.ndarray], dtype: np.dtype) -> np.ndarray:
        """Returns the parameter, [*self.shape] in `dtype`, from its parts' tensors."""
        if len(self.parts) == 1:
            return tensors[self.parts[0].name].reshape(self.shape).astype(dtype, copy=False)
        param = np.empty(self.shape, dtype)
        for part in self.parts:
            place = param[part.index]
            place[...] = tensors[part.name].reshape(place.shape)
        return param

    def unpack(self, param: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the tensors, contiguous, that `pack` makes this parameter from."""
        return {
            part.name: np.ascontiguousarray(param[part.index].reshape(part.shape))
            for part in self.parts
        }


def single_rule(path: Path, name: str, hf_shape: Shape, shape: Shape | None = None) -> Rule:
    """Returns the rule of a parameter that is one tensor, in another shape perhaps."""
    return Rule(path, shape or hf_shape, (Part(name, hf_shape),))


def qkv_rule(config: LlamaConfig, path: Path, prefix: str, kind: str, width: Shape) -> Rule:
    """Returns the rule of the fused projection (`width` is (D,)) or its bias (`width` is ())."""
    kv_heads, groups, head_dim = config.num_kv_heads, config.num_groups, config.head_dim
    query, single = (config.num_heads * head_dim, *width), (kv_heads * head_dim, *width)
    return Rule(
        path,
        (kv_heads, groups + 2, head_dim, *width),
        (
            Part(f"{prefix}.q_proj.{kind}", query, (slice(None), slice(None, groups))),
            Part(f"{prefix}.k_proj.{kind}", single, (slice(None), groups)),
            Part(f"{prefix}.v_proj.{kind}", single, (slice(None), groups + 1)),
        ),
    )


def gate_up_rule(config: LlamaConfig, path: Path, prefix: str, kind: str, width: Shape) -> Rule:
    """Returns the rule of the two fused products of the feed-forward layer, or of their biases."""
    shape = (config.hidden_dim, *width)
    return Rule(
        path,
        (2, *shape),
        (
            Part(f"{prefix}.gate_proj.{kind}", shape, (0,)),
            Part(f"{prefix}.up_proj.{kind}", shape, (1,)),
        ),
    )


def _layer_rules(config: LlamaConfig, layer: int) -> list[Rule]:
    embed, hidden, head_dim = config.embed_dim, config.hidden_dim, config.head_dim
    here, prefix = f"layers_{layer}", f"model.layers.{layer}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    wide = (embed,)
    out_shape = (embed, config.num_kv_heads, config.num_groups, head_dim)
    rules = [
        single_rule((here, "attention_norm", "scale"), f"{prefix}.input_layernorm.weight", wide),
        qkv_rule(config, (here, "attention", "qkv"), attention, "weight", wide),
        single_rule(
            (here, "attention", "out"),
            f"{attention}.o_proj.weight",
            (embed, config.num_heads * head_dim),
            out_shape,
        ),
        single_rule((here, "mlp_norm", "scale"), f"{prefix}.post_attention_layernorm.weight", wide),
        gate_up_rule(config, (here, "mlp", "gate_up"), mlp, "weight", wide),
        single_rule((here, "mlp", "down"), f"{mlp}.down_proj.weight", (embed, hidden)),
    ]
    return rules + bias_rules(config, here, prefix)


def bias_rules(config: LlamaConfig, here: str, prefix: str) -> list[Rule]:
    """Returns the rules of a layer's biases, as far as it has any.

    Args:
      config: of the model.
      here: the layer's parameters.
      prefix: of its tensors.
    """
    attention, mlp, wide = f"{prefix}.self_attn", f"{prefix}.mlp", (config.embed_dim,)
    rules = []
    if config.attention_bias:
        rules.append(qkv_rule(config, (here, "attention", "qkv_bias"), attention, "bias", ()))
        rules.append(single_rule((here, "attention", "out_bias"), f"{attention}.o_proj.bias", wide))
    if config.mlp_bias:
        rules.append(gate_up_rule(config, (here, "mlp", "gate_up_bias"), mlp, "bias", ()))
        rules.append(single_rule((here, "mlp", "down_bias"), f"{mlp}.down_proj.bias", wide))
    return rules


def make_rules(config: LlamaConfig) -> list[Rule]:
    """Returns the table for a model: one rule a parameter, in the order of computation."""
    table = (config.vocab_size, config.embed_dim)
    rules = [single_rule(("embedding",), "model.embed_tokens.weight", table)]
    for layer in range(config.num_layers):
        rules += _layer_rules(config, layer)
    rules.append(single_rule(("final_norm", "scale"), "model.norm.weight", (config.embed_dim,)))
    if not config.tie_embeddings:
        rules.append(single_rule(("head",), "lm_head.weight", table))
    return rules


def nest(leaves: dict[Path, Any]) -> dict[str, Any]:
    """Returns the nested dict with a leaf at each path."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def flatten(tree: dict[str, Any], prefix: Path = ()) -> dict[Path, Any]:
    """Returns the leaves of a nested dict by path: the inverse of `nest`."""
    leaves: dict[Path, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves |= flatten(value, (*prefix, key))
        else:
            leaves[(*prefix, key)] = value
    return leaves


def expected_shapes(config: LlamaConfig) -> dict[str, Any]:
    """Returns the parameter tree of a model with each array's shape in its place."""
    return nest({rule.path: rule.shape for rule in make_rules(config)})

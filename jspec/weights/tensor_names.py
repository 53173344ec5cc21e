"""The table of tensor names: which Hugging Face tensors fill which parameter.

Every checkpoint format is read as Hugging Face tensors. Each tensor fills a slice of one parameter:

```
  layers_3/attention/qkv [K, G+2, H, D]
     [:, :G]   <- model.layers.3.self_attn.q_proj.weight [N·H, D]   (query head n = k·G + g)
     [:, G]    <- model.layers.3.self_attn.k_proj.weight [K·H, D]
     [:, G+1]  <- model.layers.3.self_attn.v_proj.weight [K·H, D]
```

A slice followed by a reshape works in both directions, so one table both loads and saves.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec.models.config import LlamaConfig

Path = tuple[str, ...]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """One Hugging Face tensor; `index` is the slice of a parameter that holds its elements."""

    name: str
    shape: Shape
    index: tuple[Any, ...] = (Ellipsis,)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter, by its keys in the nested dict; its parts set each element exactly once."""

    path: Path
    shape: Shape
    parts: tuple[Part, ...]

    def pack(self, tensors: Mapping[str, np.ndarray], dtype: np.dtype) -> np.ndarray:
        """Returns the parameter, [*self.shape] in `dtype`, made of its tensors."""
        if len(self.parts) == 1:
            return tensors[self.parts[0].name].reshape(self.shape).astype(dtype, copy=False)
        param = np.empty(self.shape, dtype)
        for part in self.parts:
            target = param[part.index]
            target[...] = tensors[part.name].reshape(target.shape)
        return param

    def unpack(self, param: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the tensors, contiguous, that `pack` makes this parameter from."""
        return {
            part.name: np.ascontiguousarray(param[part.index].reshape(part.shape))
            for part in self.parts
        }


def one_tensor(path: Path, name: str, hf_shape: Shape, shape: Shape | None = None) -> Parameter:
    """Returns a parameter that is one tensor; its shape may differ from the tensor's."""
    return Parameter(path, shape or hf_shape, (Part(name, hf_shape),))


def qkv_tensors(config: LlamaConfig, path: Path, prefix: str, kind: str, width: Shape) -> Parameter:
    """Returns the fused projection of queries, keys and values, or its bias.

    Args:
      config: the model's.
      path: the parameter's.
      prefix: of the tensors' names.
      kind: "weight" or "bias".
      width: (inputs,) of the weight, () of the bias.
    """
    kv_heads, groups, head_dim = config.num_kv_heads, config.num_groups, config.head_dim
    query, single = (config.num_heads * head_dim, *width), (kv_heads * head_dim, *width)
    return Parameter(
        path,
        (kv_heads, groups + 2, head_dim, *width),
        (
            Part(f"{prefix}.q_proj.{kind}", query, (slice(None), slice(None, groups))),
            Part(f"{prefix}.k_proj.{kind}", single, (slice(None), groups)),
            Part(f"{prefix}.v_proj.{kind}", single, (slice(None), groups + 1)),
        ),
    )


def gate_up_tensors(
    config: LlamaConfig, path: Path, prefix: str, kind: str, width: Shape
) -> Parameter:
    """Returns the two fused products of the feed-forward layer; see `qkv_tensors`."""
    shape = (config.hidden_dim, *width)
    gate = Part(f"{prefix}.gate_proj.{kind}", shape, (0,))
    up = Part(f"{prefix}.up_proj.{kind}", shape, (1,))
    return Parameter(path, (2, *shape), (gate, up))


def bias_tensors(config: LlamaConfig, here: str, prefix: str) -> list[Parameter]:
    """Returns the biases that the config asks for, of the layer with the key `here`."""
    attention, mlp, wide = f"{prefix}.self_attn", f"{prefix}.mlp", (config.embed_dim,)
    found = []
    if config.attention_bias:
        found.append(qkv_tensors(config, (here, "attention", "qkv_bias"), attention, "bias", ()))
        found.append(one_tensor((here, "attention", "out_bias"), f"{attention}.o_proj.bias", wide))
    if config.mlp_bias:
        found.append(gate_up_tensors(config, (here, "mlp", "gate_up_bias"), mlp, "bias", ()))
        found.append(one_tensor((here, "mlp", "down_bias"), f"{mlp}.down_proj.bias", wide))
    return found


def _layer(config: LlamaConfig, index: int) -> list[Parameter]:
    embed, hidden = config.embed_dim, config.hidden_dim
    here, prefix, wide = f"layers_{index}", f"model.layers.{index}", (config.embed_dim,)
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    out_hf = (embed, config.num_heads * config.head_dim)
    out = (embed, config.num_kv_heads, config.num_groups, config.head_dim)
    return [
        one_tensor((here, "attention_norm", "scale"), f"{prefix}.input_layernorm.weight", wide),
        qkv_tensors(config, (here, "attention", "qkv"), attention, "weight", wide),
        one_tensor((here, "attention", "out"), f"{attention}.o_proj.weight", out_hf, out),
        one_tensor((here, "mlp_norm", "scale"), f"{prefix}.post_attention_layernorm.weight", wide),
        gate_up_tensors(config, (here, "mlp", "gate_up"), mlp, "weight", wide),
        one_tensor((here, "mlp", "down"), f"{mlp}.down_proj.weight", (embed, hidden)),
        *bias_tensors(config, here, prefix),
    ]


def parameter_table(config: LlamaConfig) -> list[Parameter]:
    """Returns every parameter of a model with its tensors, in the order of computation."""
    vocabulary = (config.vocab_size, config.embed_dim)
    table = [one_tensor(("embedding",), "model.embed_tokens.weight", vocabulary)]
    for index in range(config.num_layers):
        table += _layer(config, index)
    table.append(one_tensor(("final_norm", "scale"), "model.norm.weight", (config.embed_dim,)))
    if not config.tie_embeddings:
        table.append(one_tensor(("head",), "lm_head.weight", vocabulary))
    return table

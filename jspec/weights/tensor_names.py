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

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jspec.models.config import DecoderConfig

Path = tuple[str, ...]
Shape = tuple[int, ...]
_WHOLE, _ALL = (Ellipsis,), slice(None)  # slices of a parameter, and of an axis


class Part(NamedTuple):
    """One Hugging Face tensor; `index` is the slice of a parameter that holds its elements."""

    name: str
    shape: Shape
    index: tuple[Any, ...] = _WHOLE

    def take(self, param: np.ndarray) -> np.ndarray:
        """Returns the tensor, contiguous, out of its parameter."""
        return np.ascontiguousarray(param[self.index].reshape(self.shape))


class Parameter(NamedTuple):
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
        """Returns the tensors that `pack` makes this parameter from."""
        return {part.name: part.take(param) for part in self.parts}


def one_tensor(path: Path, name: str, shape: Shape) -> Parameter:
    """Returns a parameter that is one tensor of the same shape."""
    return Parameter(path, shape, (Part(name, shape),))


def _linear(
    path: Path, out: Shape, inputs: Shape, parts: Mapping[str, tuple[Any, ...]], has_bias: bool
) -> list[Parameter]:
    """Returns a kernel [*out, *inputs] and perhaps its bias [*out].

    `parts` are Hugging Face's layers, whose weights are matrices, with their slices of `out`.
    """
    rows = {name: np.empty(out, bool)[index].size for name, index in parts.items()}
    width = math.prod(inputs)
    weights = [Part(f"{name}.weight", (rows[name], width), parts[name]) for name in parts]
    biases = [Part(f"{name}.bias", (rows[name],), parts[name]) for name in parts]
    kernel = Parameter(path, (*out, *inputs), tuple(weights))
    bias = Parameter((*path[:-1], f"{path[-1]}_bias"), out, tuple(biases))
    return [kernel, bias] if has_bias else [kernel]


def attention_tensors(
    config: DecoderConfig, block: Path, prefix: str, width: int | None = None
) -> list[Parameter]:
    """Returns the attention of a block: queries, keys and values in one, and the output.

    `block` is its path and `prefix` that of its tensors' names. The first has `width` inputs, by
    default the model's.
    """
    name, has_bias = f"{prefix}.self_attn", config.attention_bias
    kv_heads, groups, head_dim = config.num_kv_heads, config.num_groups, config.head_dim
    qkv = {
        f"{name}.q_proj": (_ALL, slice(None, groups)),
        f"{name}.k_proj": (_ALL, groups),
        f"{name}.v_proj": (_ALL, groups + 1),
    }
    fused, heads = (kv_heads, groups + 2, head_dim), (kv_heads, groups, head_dim)
    embed, path = (config.embed_dim,), (*block, "attention")
    return [
        *_linear((*path, "qkv"), fused, (width or config.embed_dim,), qkv, has_bias),
        *_linear((*path, "out"), embed, heads, {f"{name}.o_proj": _WHOLE}, has_bias),
    ]


def mlp_tensors(config: DecoderConfig, block: Path, prefix: str) -> list[Parameter]:
    """Returns the feed-forward layer of a block, gate and up in one; see `attention_tensors`."""
    name, path, has_bias = f"{prefix}.mlp", (*block, "mlp"), config.mlp_bias
    embed, hidden = (config.embed_dim,), (config.hidden_dim,)
    gate_up = {f"{name}.gate_proj": (0,), f"{name}.up_proj": (1,)}
    return [
        *_linear((*path, "gate_up"), (2, *hidden), embed, gate_up, has_bias),
        *_linear((*path, "down"), embed, hidden, {f"{name}.down_proj": _WHOLE}, has_bias),
    ]


def parameter_table(config: DecoderConfig) -> list[Parameter]:
    """Returns every parameter of a model with its tensors, in the order of computation."""
    wide, vocabulary = (config.embed_dim,), (config.vocab_size, config.embed_dim)
    table = [one_tensor(("embedding",), "model.embed_tokens.weight", vocabulary)]
    for index in range(config.num_layers):
        key, prefix = f"layers_{index}", f"model.layers.{index}"
        table += [
            one_tensor((key, "attention_norm", "scale"), f"{prefix}.input_layernorm.weight", wide),
            *attention_tensors(config, (key,), prefix),
            one_tensor(
                (key, "mlp_norm", "scale"), f"{prefix}.post_attention_layernorm.weight", wide
            ),
            *mlp_tensors(config, (key,), prefix),
        ]
    table.append(one_tensor(("final_norm", "scale"), "model.norm.weight", wide))
    if not config.tie_embeddings:
        table.append(one_tensor(("head",), "lm_head.weight", vocabulary))
    return table

"""Models and heads whose parameters are shapes, to compile without a device."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec import kernels
from jspec.common.errors import check_among
from jspec.common.typing import Params
from jspec.drafters import BuiltDrafter, DrafterSpec
from jspec.drafters.eagle import make_eagle_drafter
from jspec.drafters.eagle_head import EagleConfig, default_feature_layers, init_eagle_params
from jspec.kernels.packed import STRIP
from jspec.lab.analysis.call_cost import load_config
from jspec.models.sharding import parameter_specs, spread_config
from jspec.weights.assemble import as_dtype
from jspec.weights.parameter import Parameter
from jspec.weights.quantize import (
    KINDS,
    Q4_0,
    block_format,
    check_kind,
    is_quantizable,
    num_bytes,
    quantize,
)
from jspec.weights.resolver import LoadedModel
from jspec.weights.tensor_names import parameter_table
from jspec.weights.tokenizers.tokenizer import ByteTokenizer

_HEAD_VOCAB = 32_000  # tokens that published heads of EAGLE-3 can propose


def shape_model(name: str, dtype: str, quantization: str, mesh: Mesh | None = None) -> LoadedModel:
    """Returns a model whose parameters are shapes; on a mesh, of the spread model.

    Raises:
      InputError: no such model, or one that cannot be rounded so.
    """
    config = load_config(re.sub(r"^llama-", "llama", name.removeprefix("random:")))
    float_type = as_dtype(dtype)
    check_among("quantization", quantization, ("auto", "none", *KINDS))
    kind = quantization if quantization in KINDS else None
    check_kind(config, kind)
    if mesh is not None:
        config = spread_config(config, mesh.shape[kernels.MODEL_AXIS])
    params = {}
    for entry in parameter_table(config):
        leaf = jax.ShapeDtypeStruct(entry.shape, entry.dtype_in(float_type))
        if kind == Q4_0 and is_quantizable(entry):
            leaf = packed_shape(entry, float_type)
        elif kind is not None and is_quantizable(entry):
            how = {"path": entry.path, "kind": kind, "dtype": float_type}
            leaf = jax.eval_shape(functools.partial(quantize, **how), leaf)
        params[entry.path] = leaf
    params = unflatten_dict(params)
    if mesh is not None:
        specs = parameter_specs(params, mesh.shape[kernels.MODEL_AXIS])
        params = jax.tree.map(
            lambda spec, leaf: leaf.update(sharding=NamedSharding(mesh, spec)), specs, params,
            is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
        )  # fmt: skip
    tokenizer = ByteTokenizer(config.vocab_size, config.bos_id, config.eos_ids)
    # As with random weights, all ids are used.
    return LoadedModel(config, params, tokenizer, name, True, kind, mesh)


def packed_shape(entry: Parameter, dtype: Any) -> kernels.PackedKernel:
    """Returns a kernel as in a GGUF file of Q4_0, of shapes."""
    outputs = math.prod(entry.shape[:-1])
    strips = -(-outputs // STRIP)
    blocks: Any = jax.ShapeDtypeStruct((strips, num_bytes(entry, Q4_0, 0) // strips), jnp.uint8)
    form = block_format(entry.path)
    return kernels.PackedKernel(blocks, form, entry.shape, jnp.dtype(dtype), takes_bytes=True)


def build_eagle(spec: DrafterSpec, *, has_weights: bool = False) -> BuiltDrafter:
    """Returns a head of the shapes of the published ones; of random weights if asked for."""
    config, rng_key = eagle_config(spec), jax.random.key(0)
    init = functools.partial(init_eagle_params, config)

    def cast(params: Params) -> Params:
        return jax.tree.map(
            lambda leaf: leaf.astype(spec.dtype) if leaf.dtype == jnp.float32 else leaf, params
        )

    if has_weights:
        params = cast(jax.jit(init)(rng_key))
    else:
        params = jax.eval_shape(lambda rng_key: cast(init(rng_key)), rng_key)
    return BuiltDrafter(make_eagle_drafter(spec, config), params)


def eagle_config(spec: DrafterSpec) -> EagleConfig:
    """Returns the config of a head as the published ones for a target: one layer, few tokens."""
    target = spec.target_config
    changes = {"vocab_size": min(_HEAD_VOCAB, target.vocab_size), "tie_embeddings": False}
    count = target.num_shards  # the head is whole on every device of a mesh
    names = "num_heads", "num_kv_heads", "hidden_dim"
    changes |= {name: getattr(target, name) * count for name in names}
    layer = dataclasses.replace(target.as_llama(), num_layers=1, **changes)
    read = default_feature_layers(target.num_layers)
    return EagleConfig(layer, target.vocab_size, read, target.num_layers)

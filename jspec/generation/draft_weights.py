"""A draft model's weights where nobody says how.

On a GPU they are in int8, if its blocks are faster so. On a CPU, packed weights are rounded to Q4_0
where that saves bits, and take inputs that are rounded to bytes: see docs/measurements.md. By a
lossless rule, rounding a draft changes no answer's distribution.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from jspec import kernels
from jspec.common.typing import Params
from jspec.generation.graph_trial import check_one_graph
from jspec.models.config import DecoderConfig
from jspec.models.decoder import Block, init_cache
from jspec.models.layers import rope_cos_sin
from jspec.speculation.acceptance import get_rule
from jspec.speculation.types import AcceptanceRule
from jspec.weights.packed_weights import round_packed_params
from jspec.weights.quantize import PACKED, Q4_0, is_kernel, quantize
from jspec.weights.resolver import LoadedModel

_KIND = "int8"


def with_fast_weights(
    draft: LoadedModel,
    acceptance: str | AcceptanceRule,
    load_rounded: Callable[..., LoadedModel],
) -> LoadedModel:
    """Returns a draft model of floats, or rounded to int8 where the device is faster with that.

    Packed weights become "q4_0". Of floats, a block of each is timed
    once on a device, by programs as rounds are; see `kernels.choose_weights`. By a lossy rule the
    answers depend on the draft: it stays as it is.
    `load_rounded(quantization=...)` loads it again: its weights are rounded once, from the file's.
    """
    rule = get_rule(acceptance) if isinstance(acceptance, str) else acceptance
    if not rule.is_lossless:
        return draft
    if draft.quantization == PACKED:
        params = round_packed_params(draft.params)
        return dataclasses.replace(
            draft, params=params, quantization=Q4_0, is_quantization_chosen=True
        )
    check_one_graph()
    config, dtype = draft.config, draft.params["embedding"].dtype
    if draft.quantization is not None or draft.mesh is not None or config.num_experts:
        return draft

    def reference(params: Params, *arrays: Any) -> Any:
        return Block(config).apply({"params": params}, *arrays, block_offset=0)

    def kinds() -> dict[str, Any]:
        floats = jax.eval_shape(lambda: draft.params["layers_0"])
        rounded = jax.eval_shape(lambda params: _rounded(params, dtype), floats)
        others = _shapes_of_a_call(config, dtype)
        return {"none": (floats, *others), _KIND: (rounded, *others)}

    if kernels.choose_weights(reference, config, kinds) != _KIND:
        return draft
    return dataclasses.replace(load_rounded(quantization=_KIND), is_quantization_chosen=True)


def _rounded(params: Params, dtype: Any) -> Params:
    leaves: dict[Any, Any] = dict(flatten_dict(params))
    for path in filter(is_kernel, leaves):
        leaves[path] = quantize(leaves[path], path, _KIND, dtype)
    return unflatten_dict(leaves)


def _shapes_of_a_call(config: DecoderConfig, dtype: Any) -> tuple[Any, ...]:
    """Returns the shapes of a block's stream, rope, visible slots and cache."""

    def make() -> tuple[Any, ...]:
        x = jnp.zeros([1, 1, config.embed_dim])
        positions = jnp.zeros([1, 1], jnp.int32)
        cache = init_cache(config, batch_size=1, capacity=1, dtype=dtype)
        visible = jnp.zeros([1, 1, cache.num_slots], bool)
        return x, rope_cos_sin(config, positions), visible, cache.layer(0)

    return jax.eval_shape(make)

"""Times what a call consists of: its products, its attention, and what is done number by number."""

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from jspec.evaluation.analysis.call_cost import streamed_rules
from jspec.evaluation.benchmarking.calls import call_loop
from jspec.evaluation.benchmarking.repeated import Loop, with_first
from jspec.evaluation.benchmarking.turns import Turn, take_turns
from jspec.generation.capacity import capacity_for
from jspec.kernels import first_argmax, rotate_heads, swiglu
from jspec.models import KVCache, init_cache
from jspec.models.cache import causal_mask
from jspec.models.layers import Kernel, RMSNorm, linear
from jspec.models.rope import rope_cos_sin
from jspec.weights.quantize import num_contracted
from jspec.weights.resolver import LoadedModel

_LITTLE = 1e-30  # changes nothing, but has to be waited for


class CallShape(NamedTuple):
    """A call of a model.

    Attributes:
      width: tokens of each row.
      context: tokens in each row's cache before them.
      batch_size: rows.
    """

    width: int
    context: int
    batch_size: int

    @property
    def rows(self) -> int:
        """Rows of its products."""
        return self.width * self.batch_size


class CallParts(NamedTuple):
    """Seconds of a call.

    Attributes:
      call: all of it, with a greedy choice.
      products: its matrix products, one after the other, with the weights that it has.
      attention: that of all layers.
      elementwise: norms, rotations, gates and sums of all layers, and the greedy choice.
    """

    call: float
    products: float
    attention: float
    elementwise: float


def time_parts(
    model: LoadedModel, shapes: Iterable[CallShape], repeats: int
) -> Iterator[tuple[CallShape, list[Turn[CallParts]]]]:
    """Yields each call's parts beside those of the first call, turn by turn.

    The caches of one shape are gone before those of the next are made, but for the first's.
    """
    shapes = iter(shapes)
    first = next(shapes)
    of_first = _make_loops(model, first)
    yield first, take_turns(of_first, of_first, CallParts, repeats)
    for shape in shapes:
        yield shape, take_turns(_make_loops(model, shape), of_first, CallParts, repeats)


def _make_loops(model: LoadedModel, shape: CallShape) -> dict[str, Loop]:
    """Returns compiled loops over a number of times a call, and each of its parts, by name."""
    makers = _call_loop, product_loop, attention_loop, elementwise_loop
    return {part: make(model, shape) for part, make in zip(CallParts._fields, makers, strict=True)}


def _call_loop(model: LoadedModel, shape: CallShape) -> Loop:
    width, context, batch_size = shape
    return call_loop(model, width, context=context, batch_size=batch_size)


def product_loop(model: LoadedModel, shape: CallShape) -> Loop:
    """Returns a compiled loop over a number of times all products."""
    leaves = flatten_dict(model.params)
    paths = [rule.path for rule in streamed_rules(model.config) if num_contracted(rule.path)]

    @jax.jit
    def loop(kernels: list[Kernel], num_turns: jax.Array) -> jax.Array:
        def body(_: jax.Array, carry: jax.Array) -> jax.Array:
            for path, kernel in zip(paths, kernels, strict=True):
                inputs = kernel.shape[-num_contracted(path) :]
                outputs = linear(jnp.full([1, shape.rows, *inputs], carry), kernel, len(inputs))
                # Behind the barrier no output can be left out.
                carry += _LITTLE * jax.lax.optimization_barrier(outputs).reshape(-1)[0]
            return carry

        return jax.lax.fori_loop(0, num_turns, body, jnp.float32(1))

    return functools.partial(loop, [leaves[path] for path in paths])


def attention_loop(model: LoadedModel, shape: CallShape) -> Loop:
    """Returns a compiled loop over a number of times the attention of all layers."""
    config = model.config
    cache = init_cache(
        config,
        batch_size=shape.batch_size,
        capacity=capacity_for(shape.context, shape.width),
        dtype=model.params["embedding"].dtype,
    ).commit(jnp.full([shape.batch_size], shape.context, jnp.int32))
    queries = jnp.ones([shape.batch_size, shape.width, config.num_heads, config.head_dim])

    @jax.jit
    def loop(cache: KVCache, queries: jax.Array, num_turns: jax.Array) -> jax.Array:
        visible = cache.visible(causal_mask(shape.width))

        def body(_: jax.Array, queries: jax.Array) -> jax.Array:
            for index in range(config.num_layers):
                queries += _LITTLE * cache.layer(index).attend(queries, visible)
            return queries

        return jax.lax.fori_loop(0, num_turns, body, queries)

    return functools.partial(loop, cache, queries)


def elementwise_loop(model: LoadedModel, shape: CallShape) -> Loop:
    """Returns a compiled loop over a number of times all norms, rotations, gates and the choice."""
    config = model.config
    rows = shape.batch_size, shape.width
    x = jnp.ones([*rows, config.embed_dim])
    qkv = jnp.ones([*rows, config.num_kv_heads, config.num_groups + 2, config.head_dim])
    gate_up = jnp.ones([*rows, 2, config.hidden_dim])
    logits = jnp.zeros([*rows, config.vocab_size])
    scale = {"params": {"scale": jnp.ones([config.embed_dim], model.params["embedding"].dtype)}}
    angles = rope_cos_sin(config, jnp.zeros(rows, jnp.int32))

    def norm(x: jax.Array) -> Any:
        return RMSNorm(config.norm_epsilon).apply(scale, x)

    @jax.jit
    def loop(operands: tuple[jax.Array, ...], num_turns: jax.Array) -> jax.Array:
        def body(_: jax.Array, operands: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            x, qkv, gate_up, logits = operands
            for _layer in range(config.num_layers):
                # Behind the barrier no output can be left out.
                queries, *_rest = jax.lax.optimization_barrier(rotate_heads(qkv, *angles))
                hidden = jax.lax.optimization_barrier(swiglu(gate_up))
                qkv = with_first(qkv, queries[0, 0, 0, 0])
                gate_up = with_first(gate_up, hidden[0, 0, 0])
                x = x + norm(x)
                x = x + norm(x)
            chosen = first_argmax(logits)[0][0, 0].astype(jnp.float32)
            used = x[0, 0, 0] + qkv[0, 0, 0, 0, 0] + gate_up[0, 0, 0, 0] + chosen
            return norm(x), qkv, gate_up, with_first(logits, _LITTLE * used)

        return jax.lax.fori_loop(0, num_turns, body, operands)[-1]

    return functools.partial(loop, (x, qkv, gate_up, logits))

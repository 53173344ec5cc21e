"""Times what a call consists of: all of its products, its attention, its gates and the choice."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.analysis.call_cost import streamed_rules
from jspec.benchmarking.calls import call_loop
from jspec.benchmarking.repeated import seconds_in_turn
from jspec.capacity import capacity_for
from jspec.models import KVCache, init_cache
from jspec.models.cache import causal_mask
from jspec.models.layers import Kernel, linear, swiglu
from jspec.sampling import first_argmax
from jspec.weights.quantize import num_contracted
from jspec.weights.resolver import LoadedModel
from jspec.weights.rules import flatten

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
      elementwise: the gates of all layers and the greedy choice, which XLA computes.
    """

    call: float
    products: float
    attention: float
    elementwise: float


def time_parts(
    model: LoadedModel, shapes: Iterable[CallShape]
) -> Iterator[tuple[CallShape, CallParts, CallParts]]:
    """Yields each call's parts, and those of the first call, measured by turns with them.

    The caches of one shape are gone before those of the next are made.
    """
    first = None
    for shape in shapes:
        first = first or shape
        loops = {}
        for one in (shape, first):
            loops[one, "call"] = _call_loop(model, one)
            loops[one, "products"] = product_loop(model, one.rows)
            loops[one, "attention"] = attention_loop(model, one)
            loops[one, "elementwise"] = elementwise_loop(model, one)
        seconds = seconds_in_turn(loops)
        own, of_first = (
            CallParts(*(seconds[one, part] for part in CallParts._fields)) for one in (shape, first)
        )
        yield shape, own, of_first


def _call_loop(model: LoadedModel, shape: CallShape) -> Callable[[jax.Array], jax.Array]:
    width, context, batch_size = shape
    return call_loop(model, width, context=context, batch_size=batch_size)


def product_loop(model: LoadedModel, rows: int) -> Callable[[jax.Array], jax.Array]:
    """Returns a compiled loop over a number of times all products of a call on so many rows."""
    leaves = flatten(model.params)
    paths = [rule.path for rule in streamed_rules(model.config) if num_contracted(rule.path)]

    @jax.jit
    def loop(kernels: list[Kernel], num_turns: jax.Array) -> jax.Array:
        def body(_: jax.Array, carry: jax.Array) -> jax.Array:
            for path, kernel in zip(paths, kernels, strict=True):
                inputs = kernel.shape[-num_contracted(path) :]
                outputs = linear(jnp.full([1, rows, *inputs], carry), kernel, len(inputs))
                # Behind the barrier no output can be left out.
                carry += _LITTLE * jax.lax.optimization_barrier(outputs).reshape(-1)[0]
            return carry

        return jax.lax.fori_loop(0, num_turns, body, jnp.float32(1))

    return functools.partial(loop, [leaves[path] for path in paths])


def attention_loop(model: LoadedModel, shape: CallShape) -> Callable[[jax.Array], jax.Array]:
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


def elementwise_loop(model: LoadedModel, shape: CallShape) -> Callable[[jax.Array], jax.Array]:
    """Returns a compiled loop over a number of times all gates and the greedy choice."""
    rows = shape.batch_size, shape.width
    ones = jnp.ones([*rows, 2, model.config.hidden_dim])
    logits = jnp.zeros([*rows, model.config.vocab_size])

    @jax.jit
    def loop(gate_up: jax.Array, logits: jax.Array, num_turns: jax.Array) -> jax.Array:
        def body(_: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            gate_up, logits = carry
            for _layer in range(model.config.num_layers):
                # Behind the barrier no output can be left out.
                hidden = jax.lax.optimization_barrier(swiglu(gate_up))
                gate_up = _with_first(gate_up, hidden[0, 0, 0])
            chosen = first_argmax(logits)[0][0, 0].astype(jnp.float32)
            return gate_up, _with_first(logits, _LITTLE * chosen + gate_up[0, 0, 0, 0])

        return jax.lax.fori_loop(0, num_turns, body, (gate_up, logits))[1]

    return functools.partial(loop, ones, logits)


def _with_first(array: jax.Array, number: jax.Array) -> jax.Array:
    """Replaces the first number, in place."""
    return jax.lax.dynamic_update_slice(array, number.reshape([1] * array.ndim), [0] * array.ndim)

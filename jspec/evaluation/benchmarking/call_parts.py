"""Times a model's calls, and what a call consists of: products, attention, elementwise work."""

import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from jspec.common.timing import Loop, make_loop, seconds_each, seconds_in_turn, with_first
from jspec.evaluation.analysis.call_cost import streamed_rules
from jspec.generation.capacity import capacity_for
from jspec.kernels import first_argmax, rotate_heads, swiglu
from jspec.models import init_cache, make_apply
from jspec.models.cache import causal_mask
from jspec.models.layers import RMSNorm, linear
from jspec.models.rope import rope_cos_sin
from jspec.weights.quantize import num_contracted
from jspec.weights.resolver import LoadedModel

_LITTLE = 1e-30  # changes no value, but the next turn has to wait for it
_MOST_WIDTH = 16  # of a verify call; wider calls are those of a prefill


class CallShape(NamedTuple):
    """A call of a model.

    Attributes:
      width: tokens of each row.
      context: tokens in each row's cache before them.
      batch_size: rows.
    """

    width: int
    context: int
    batch_size: int = 1


class CallParts(NamedTuple):
    """Seconds of a call.

    Attributes:
      call: all of it, with a greedy choice.
      products: its matrix products, one after the other, with the model's weights.
      attention: that of all layers.
      elementwise: norms, rotations, gates and sums of all layers, and the greedy choice.
    """

    call: float
    products: float
    attention: float
    elementwise: float


class CallTimes(NamedTuple):
    """A call beside the model's first call; medians over several turns.

    Attributes:
      shape: of the call.
      seconds: of its parts.
      ratio: of its seconds to those of the first call.
      expected_ratio: the same, if the two differ by the measured parts alone.
      first_seconds: of the first call.
    """

    shape: CallShape
    seconds: CallParts
    ratio: float
    expected_ratio: float
    first_seconds: float


def time_parts(
    model: LoadedModel, shapes: Iterable[CallShape], repeats: int
) -> Iterator[CallTimes]:
    """Yields each call's times; its parts and those of the first call take turns.

    The caches of one shape are freed before those of the next are made, except the first's.
    """
    shapes = iter(shapes)
    first = next(shapes)
    of_first = _make_loops(model, first)
    for shape in itertools.chain([first], shapes):
        own = of_first if shape == first else _make_loops(model, shape)
        loops = {}
        for name in CallParts._fields:  # each right before or right after the first call's
            loops |= {("own", name): own[name], ("first", name): of_first[name]}
        turns = list(seconds_in_turn(loops, repeats))
        yield summarise_turns(
            shape,
            *([CallParts(*(turn[one, name] for name in CallParts._fields)) for turn in turns]
              for one in ("own", "first")),
        )  # fmt: skip


def summarise_turns(
    shape: CallShape, own: Sequence[CallParts], first: Sequence[CallParts]
) -> CallTimes:
    """Returns the medians over turns of a call and of the first one."""
    pairs = list(zip(own, first, strict=True))
    expected = [1 + (sum(mine[1:]) - sum(theirs[1:])) / theirs.call for mine, theirs in pairs]
    return CallTimes(
        shape,
        CallParts(*map(statistics.median, zip(*own, strict=True))),
        statistics.median(mine.call / theirs.call for mine, theirs in pairs),
        statistics.median(expected),
        statistics.median(theirs.call for theirs in first),
    )


def time_call(model: LoadedModel, width: int, context: int) -> float:
    """Returns the seconds of a call of one row, the median of several measurements."""
    return seconds_each(call_loop(model, CallShape(width, context)))


def _make_loops(model: LoadedModel, shape: CallShape) -> dict[str, Loop]:
    makers = call_loop, product_loop, attention_loop, elementwise_loop
    return {part: make(model, shape) for part, make in zip(CallParts._fields, makers, strict=True)}


def _cache_of(model: LoadedModel, shape: CallShape) -> Any:
    """Returns a cache that holds the call's context."""
    cache = init_cache(
        model.config,
        batch_size=shape.batch_size,
        capacity=capacity_for(shape.context, shape.width),
        dtype=model.params["embedding"].dtype,
    )
    return cache.commit(jnp.full([shape.batch_size], shape.context, jnp.int32))


def call_loop(model: LoadedModel, shape: CallShape) -> Loop:
    """Returns a loop over calls, each with a greedy choice, on what the one before it chose."""
    apply = make_apply(model.config)
    # Of a long block, as of a prefill, only the last logits are wanted.
    rows, is_long = shape.batch_size, shape.width > _MOST_WIDTH
    last = jnp.full([rows], shape.width - 1, jnp.int32) if is_long else None

    def turn(params: Any, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        cache, tokens = carry
        logits, _, cache = apply(params, tokens, cache, logits_at=last)
        return cache, jnp.broadcast_to(first_argmax(logits)[0], tokens.shape)

    tokens = jnp.zeros([rows, shape.width], jnp.int32)
    return make_loop(turn, model.params, (_cache_of(model, shape), tokens))


def product_loop(model: LoadedModel, shape: CallShape) -> Loop:
    """Returns a loop over all products of a call."""
    leaves, num_rows = flatten_dict(model.params), shape.width * shape.batch_size
    paths = [rule.path for rule in streamed_rules(model.config) if num_contracted(rule.path)]

    def turn(kernels: list[Any], carry: jax.Array) -> jax.Array:
        for path, kernel in zip(paths, kernels, strict=True):
            inputs = kernel.shape[-num_contracted(path) :]
            outputs = linear(jnp.full([1, num_rows, *inputs], carry), kernel, len(inputs))
            # The barrier keeps XLA from computing only the output that is read.
            carry += _LITTLE * jax.lax.optimization_barrier(outputs).reshape(-1)[0]
        return carry

    return make_loop(turn, [leaves[path] for path in paths], jnp.float32(1))


def attention_loop(model: LoadedModel, shape: CallShape) -> Loop:
    """Returns a loop over the attention of all layers."""
    config = model.config

    def turn(cache: Any, queries: jax.Array) -> jax.Array:
        visible = cache.visible(causal_mask(shape.width))
        for index in range(config.num_layers):
            queries += _LITTLE * cache.layer(index).attend(queries, visible)
        return queries

    queries = jnp.ones([shape.batch_size, shape.width, config.num_heads, config.head_dim])
    return make_loop(turn, _cache_of(model, shape), queries)


def elementwise_loop(model: LoadedModel, shape: CallShape) -> Loop:
    """Returns a loop over all norms, rotations, gates and the choice of a token."""
    config = model.config
    rows = shape.batch_size, shape.width
    scale = {"params": {"scale": jnp.ones([config.embed_dim], model.params["embedding"].dtype)}}
    angles = rope_cos_sin(config, jnp.zeros(rows, jnp.int32))

    def norm(scale: Any, x: jax.Array) -> Any:
        return RMSNorm(config.norm_epsilon).apply(scale, x)

    def turn(constants: tuple[Any, Any], carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        (scale, angles), (x, qkv, gate_up, logits) = constants, carry
        for _layer in range(config.num_layers):
            # The barriers keep XLA from computing only the numbers that are read.
            queries, *_rest = jax.lax.optimization_barrier(rotate_heads(qkv, *angles))
            hidden = jax.lax.optimization_barrier(swiglu(gate_up))
            qkv = with_first(qkv, queries[0, 0, 0, 0])
            gate_up = with_first(gate_up, hidden[0, 0, 0])
            x = x + norm(scale, x)
            x = x + norm(scale, x)
        chosen = first_argmax(logits)[0][0, 0].astype(jnp.float32)
        used = x[0, 0, 0] + qkv[0, 0, 0, 0, 0] + gate_up[0, 0, 0, 0] + chosen
        return norm(scale, x), qkv, gate_up, with_first(logits, _LITTLE * used)

    x = jnp.ones([*rows, config.embed_dim])
    qkv = jnp.ones([*rows, config.num_kv_heads, config.num_groups + 2, config.head_dim])
    gate_up = jnp.ones([*rows, 2, config.hidden_dim])
    logits = jnp.zeros([*rows, config.vocab_size])
    return make_loop(turn, (scale, angles), (x, qkv, gate_up, logits))

"""Times calls of a model: many in one compiled loop, each on what the one before it chose."""

import functools

import jax
import jax.numpy as jnp

from jspec.common.typing import Params
from jspec.evaluation.benchmarking.repeated import Loop, seconds_each
from jspec.generation.capacity import capacity_for
from jspec.kernels import first_argmax
from jspec.models import KVCache, init_cache, make_apply
from jspec.weights.resolver import LoadedModel

MOST_WIDTH = 16  # of a verify call


def time_calls(
    model: LoadedModel, width: int, *, context: int, batch_size: int = 1, repeats: int = 5
) -> float:
    """Returns the seconds of a call, the median of so many measurements; see `call_loop`."""
    return seconds_each(call_loop(model, width, context=context, batch_size=batch_size), repeats)


def call_loop(model: LoadedModel, width: int, *, context: int, batch_size: int = 1) -> Loop:
    """Returns a compiled loop over a number of calls, each with a greedy choice.

    Args:
      model: what is called.
      width: tokens of each row.
      context: tokens in each row's cache before them.
      batch_size: rows.
    """
    apply = make_apply(model.config)
    cache = init_cache(
        model.config,
        batch_size=batch_size,
        capacity=capacity_for(context, width),
        dtype=model.params["embedding"].dtype,
    ).commit(jnp.full([batch_size], context, jnp.int32))
    # Of a long block, as of a prefill, only the last logits are wanted.
    last = jnp.full([batch_size], width - 1, jnp.int32) if width > MOST_WIDTH else None

    @functools.partial(jax.jit, donate_argnums=1)
    def run(params: Params, cache: KVCache, num_calls: jax.Array) -> tuple[KVCache, jax.Array]:
        def body(_: jax.Array, carry: tuple[KVCache, jax.Array]) -> tuple[KVCache, jax.Array]:
            cache, tokens = carry
            logits, _, cache = apply(params, tokens, cache, logits_at=last)
            chosen, _ = first_argmax(logits)
            return cache, jnp.broadcast_to(chosen, tokens.shape)

        tokens = jnp.zeros([batch_size, width], jnp.int32)
        return jax.lax.fori_loop(0, num_calls, body, (cache, tokens))

    def loop(num_calls: jax.Array) -> jax.Array:
        nonlocal cache  # given away: a copy at the beginning would take as long as several calls
        cache, tokens = run(model.params, cache, num_calls)
        return tokens

    return loop

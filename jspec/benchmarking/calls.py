"""Times calls of a model: many in one compiled loop, each on what the one before it chose."""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jspec.capacity import capacity_for
from jspec.models import KVCache, init_cache, make_apply
from jspec.sampling import first_argmax
from jspec.typing import Params
from jspec.weights.resolver import LoadedModel

MOST_WIDTH = 16  # of a verify call
_SECONDS = 0.5  # of one measurement, about
_MOST_CALLS = 64


def time_calls(
    model: LoadedModel, width: int, *, context: int, batch_size: int = 1, repeats: int = 5
) -> float:
    """Returns the seconds of a call, the median of several measurements.

    Args:
      model: what is called.
      width: tokens of each row.
      context: tokens in each row's cache before them.
      batch_size: rows.
      repeats: measurements.
    """
    loop, cache = _make_loop(model, width, context, batch_size)

    def seconds(num_calls: int) -> float:
        return _seconds(lambda: loop(model.params, cache, jnp.int32(num_calls)))

    more = max(1, min(_MOST_CALLS, int(_SECONDS / seconds(1))))
    # The difference: a loop begins with a copy of the cache, whatever the number of its calls.
    return statistics.median(seconds(1 + more) - seconds(1) for _ in range(repeats)) / more


def _make_loop(
    model: LoadedModel, width: int, context: int, batch_size: int
) -> tuple[Callable[[Params, KVCache, jax.Array], jax.Array], KVCache]:
    """Returns the compiled loop, warm, and the cache that it takes."""
    apply = make_apply(model.config)
    cache = init_cache(
        model.config,
        batch_size=batch_size,
        capacity=capacity_for(context, width),
        dtype=model.params["embedding"].dtype,
    ).commit(jnp.full([batch_size], context, jnp.int32))
    # Of a long block, as of a prefill, only the last logits are wanted.
    last = jnp.full([batch_size], width - 1, jnp.int32) if width > MOST_WIDTH else None

    @jax.jit
    def loop(params: Params, cache: KVCache, num_calls: jax.Array) -> jax.Array:
        def body(_: jax.Array, carry: tuple[KVCache, jax.Array]) -> tuple[KVCache, jax.Array]:
            cache, tokens = carry
            logits, _, cache = apply(params, tokens, cache, logits_at=last)
            chosen, _ = first_argmax(logits)
            return cache, jnp.broadcast_to(chosen, tokens.shape)

        tokens = jnp.zeros([batch_size, width], jnp.int32)
        return jax.lax.fori_loop(0, num_calls, body, (cache, tokens))[1]

    jax.block_until_ready(loop(model.params, cache, jnp.int32(1)))
    return loop, cache


def _seconds(call: Callable[[], jax.Array]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begin

"""Reading on: how a draft model's cache catches up with a text, in few calls of fixed widths."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from jspec.common.typing import RowCounts, Tokens
from jspec.kernels import while_any
from jspec.models import DecoderConfig, KVCache, init_cache

CATCH_UP_WIDTH = 64
_FEW = 8  # width of the calls that read the last tokens, twice as many at most


def read_on(
    call: Callable[..., Any],
    cache: KVCache,
    goal: RowCounts,
    window: Callable[[RowCounts, int], Tokens],
) -> KVCache:
    """Feeds tokens until at least `goal` slots of each row are committed.

    Args:
      call: the model, with its parameters.
      cache: the model's.
      goal: [b].
      window: returns as many tokens of each row, beginning at a slot.
    """

    def missing(cache: KVCache) -> RowCounts:
        return jnp.maximum(goal - cache.length, 0)

    def feed(width: int, cache: KVCache) -> KVCache:
        tokens = window(cache.length, width)
        _, _, fed = call(tokens, cache, logits_at=jnp.zeros_like(goal))
        return fed.commit(jnp.minimum(missing(cache), width))

    for width, most_left in ((CATCH_UP_WIDTH, 2 * _FEW), (_FEW, 0)):
        cache = while_any(
            lambda cache, most_left=most_left: missing(cache) > most_left,
            functools.partial(feed, width),
            cache,
        )
    return cache


def tokens_read(missing: RowCounts) -> RowCounts:
    """Returns the tokens in the calls by which `read_on` reads what is missing."""
    num_wide = -(-jnp.maximum(missing - 2 * _FEW, 0) // CATCH_UP_WIDTH)
    wide = num_wide * CATCH_UP_WIDTH
    return wide + -(-jnp.maximum(missing - wide, 0) // _FEW) * _FEW


def empty_caches(config: DecoderConfig, dtype: DTypeLike) -> Callable[[int, int], KVCache]:
    """Returns a function of batch size and capacity that makes a model's empty cache."""
    return lambda batch_size, capacity: init_cache(
        config, batch_size=batch_size, capacity=capacity, dtype=dtype
    )

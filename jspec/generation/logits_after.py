"""The logits after a text, by one pass over all of it: what answers are judged by.

And how much they change with the number of tokens that a pass has.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec.common import exchange
from jspec.common.typing import Params
from jspec.generation.layout import Layout
from jspec.models import KVCache, init_cache, make_apply
from jspec.speculation.types import ModelParams
from jspec.weights.resolver import LoadedModel
from jspec.weights.vocabulary import mask_padding

_SMALLEST_WIDTH = 128


def make_logits_after(model: LoadedModel) -> Callable[[Sequence[int]], np.ndarray]:
    """Returns the function from ids to the logits [v] after them: one pass over all of them."""
    config, dtype = model.own_config, model.params["embedding"].dtype
    apply = mask_padding(make_apply(config), model)

    def run(params: ModelParams, tokens: jax.Array, num_tokens: jax.Array) -> jax.Array:
        cache = init_cache(config, batch_size=1, capacity=tokens.shape[1], dtype=dtype)
        return apply(params.target, tokens, cache, logits_at=num_tokens - 1)[0][0, 0]

    program, params = jax.jit(Layout.of(model).spread(run)), ModelParams(model.params, None)

    def logits_after(token_ids: Sequence[int]) -> np.ndarray:
        # Padded to powers of two: few widths are compiled.
        width = max(_SMALLEST_WIDTH, 1 << (len(token_ids) - 1).bit_length())
        tokens = np.zeros([1, width], np.int32)
        tokens[0, : len(token_ids)] = token_ids
        length = np.array([len(token_ids)], np.int32)
        return exchange.fetch(program(params, tokens, length))

    return logits_after


def largest_gap_change(
    model: LoadedModel, texts: Sequence[Sequence[int]], widths: tuple[int, int]
) -> float:
    """Returns how far the gap between the two best logits changes with the tokens of a pass.

    Each text is split into passes of the one and of the other width, each split on a cache of its
    own making; ids that do not fill both are left out.
    """
    config, dtype = model.own_config, model.params["embedding"].dtype
    apply = make_apply(config)

    def run(params: Params, blocks: jax.Array) -> jax.Array:
        def body(cache: KVCache, block: jax.Array) -> tuple[KVCache, jax.Array]:
            logits, _, cache = apply(params, block[None], cache)
            return cache.commit(jnp.array([block.shape[0]], jnp.int32)), logits[0]

        cache = init_cache(config, batch_size=1, capacity=blocks.size, dtype=dtype)
        return jax.lax.scan(body, cache, blocks)[1].reshape(blocks.size, -1)

    def change(params: ModelParams, tokens: jax.Array) -> jax.Array:
        logits, other_logits = (run(params.target, tokens.reshape(-1, width)) for width in widths)
        values, best = jax.lax.top_k(logits, 2)
        changes = values - jnp.take_along_axis(other_logits, best, axis=1)
        return jnp.max(jnp.abs(changes[:, 0] - changes[:, 1]))

    program, params = jax.jit(Layout.of(model).spread(change)), ModelParams(model.params, None)
    unit = math.lcm(*widths)
    whole = [np.array(text[: len(text) // unit * unit], np.int32) for text in texts]
    return max(float(exchange.fetch(program(params, tokens))) for tokens in whole if tokens.size)

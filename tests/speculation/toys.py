"""Toy models of a few tokens, whose distributions depend on the two tokens before.

The context is read from the cache's slots, so that a hole, a shifted slot or a missed rollback
changes the distribution. The algorithm knows models as functions only and takes these for a Llama.
"""

import jax.numpy as jnp
import numpy as np

from jspec.models import KVCache

VOCAB = 5


def make_tables(seed=0, vocab=VOCAB, peak=2.0, disturbance=0.5):
    """Returns target and draft logits [prev, last, next] that have opinions and disagree."""
    rng = np.random.default_rng(seed)
    target = peak * rng.normal(size=(vocab, vocab, vocab))
    draft = target + disturbance * peak * rng.normal(size=target.shape)
    p, q = softmax(target), softmax(draft)
    entropy = -np.sum(p * np.log(p), axis=-1).mean()
    distance = 0.5 * np.abs(p - q).sum(axis=-1).mean()
    assert entropy <= 0.7 * np.log(vocab), entropy
    assert 0.2 <= distance <= 0.8, distance
    return jnp.asarray(target, jnp.float32), jnp.asarray(draft, jnp.float32)


def softmax(logits, temperature=1.0):
    """Returns probabilities in float64."""
    logits = np.asarray(logits, np.float64) / temperature
    exp = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exp / exp.sum(axis=-1, keepdims=True)


def toy_cache(batch_size, capacity):
    """Returns an empty cache whose keys will hold token + 1."""
    return KVCache.init(1, (batch_size, 1, capacity, 1), jnp.float32)


def toy_apply(
    table, tokens, cache, *, positions=None, block_mask=None, hidden_layers=(), logits_at=None,
    first_layer=0,
):  # fmt: skip
    """An ApplyFn for chains: logits are table[the token in the slot before, the token]."""
    del positions, block_mask, hidden_layers, first_layer
    keys = (tokens + 1).astype(jnp.float32)[:, :, None, None]
    cache = cache.write(keys, keys)
    slots = cache.length[:, None] + jnp.arange(tokens.shape[1]) - 1
    held = cache.keys[0][:, 0, :, 0]
    previous = jnp.take_along_axis(held, jnp.maximum(slots, 0), axis=1).astype(jnp.int32) - 1
    # An empty slot, read as -1, and the beginning of a text both count as token 0.
    previous = jnp.maximum(jnp.where(slots < 0, 0, previous), 0)
    if logits_at is not None:
        tokens, previous = (
            jnp.take_along_axis(x, logits_at[:, None], axis=1) for x in (tokens, previous)
        )
    logits = table[previous, tokens]
    hidden = jnp.zeros((*cache.length.shape, keys.shape[1], 1))
    return logits, hidden, cache

"""Tiny look-ahead embeddings, and what the tiny target says with them, without a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafters.lookahead import LookaheadConfig, LookaheadDrafter, save_lookahead
from jspec.models import init_cache, make_apply
from tests import tiny

CONFIG = LookaheadConfig(tiny.CONFIG.embed_dim, num_tokens=3)


def params(config=CONFIG, seed=0, std=0.4):
    """Returns embeddings."""
    values = std * np.random.default_rng(seed).normal(size=(config.num_tokens, config.embed_dim))
    return {"embeddings": jnp.asarray(values, jnp.float32)}


def params_for(pair):
    """Returns embeddings; the target keeps at least the first draft, which is its token."""
    del pair
    return params()


def save_head(folder, target_config, **options):
    """Writes embeddings for a target of that shape; returns the folder as options have it."""
    config = LookaheadConfig(target_config.embed_dim, num_tokens=3)
    save_lookahead(folder, config, params(config, **options), target_config)
    return str(folder)


def drafter(width, **options):
    """Returns the drafter of the embeddings."""
    return LookaheadDrafter(width, 61, tiny.CONFIG.vocab_size, **options)


@functools.cache
def _apply(config):
    return jax.jit(make_apply(config))


def logits_after(config, target, embeddings, text):
    """Returns the logits of all drafts after a text, [1+l v], by one call from an empty cache.

    Args:
      config: the target's.
      target: its parameters.
      embeddings: the trained ones, [l d].
      text: ids, the newest one included.
    """
    known = np.asarray(target["embedding"])[np.asarray(text)]
    inputs = np.concatenate([known, np.asarray(embeddings)])
    padded = np.pad(inputs, ((0, -len(inputs) % 192), (0, 0)))[None]  # of one size for all texts
    empty = init_cache(config, batch_size=1, capacity=padded.shape[1], dtype=jnp.float32)
    logits = _apply(config)(target, jnp.asarray(padded), empty)[0]
    return np.asarray(logits)[0, len(text) - 1 : len(inputs)]

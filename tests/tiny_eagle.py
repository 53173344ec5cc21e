"""A tiny head with opinions for the tiny target, and what it says, computed the long way round."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafters import EagleDrafter
from jspec.models.eagle import EagleConfig, apply_head, fuse, init_eagle_cache, init_eagle_params
from jspec.weights.eagle_head import save_eagle
from tests import tiny

NUM_IDS = 40  # of the target's 61 tokens
CONFIG = EagleConfig(
    dataclasses.replace(tiny.CONFIG, num_layers=1, vocab_size=NUM_IDS), tiny.CONFIG.vocab_size,
    (0, 1, 2),
)  # fmt: skip


def params(seed=0, std=0.4, config=CONFIG):
    """Returns a head of large weights that cannot propose every third token."""
    shapes = jax.eval_shape(lambda key: init_eagle_params(config, key), jax.random.key(0))
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        noise = std * rng.normal(size=leaf.shape)
        return jnp.asarray(1 + noise if path[-1].key == "scale" else noise, jnp.float32)

    head = jax.tree_util.tree_map_with_path(draw, shapes)
    ids = np.flatnonzero(np.arange(config.target_vocab_size) % 3 != 2)[: config.layer.vocab_size]
    return head | {"ids": jnp.asarray(ids, jnp.int32)}


def save_head(folder, target_config):
    """Writes a head for a target of that shape; returns the folder as options have it."""
    num_ids = (2 * target_config.vocab_size + 1) // 3
    layer = dataclasses.replace(target_config, num_layers=1, vocab_size=num_ids)
    config = EagleConfig(layer, target_config.vocab_size, (0, target_config.num_layers))
    save_eagle(folder, config, params(config=config))
    return str(folder)


def drafter(width, **options):
    """Returns the drafter of the head."""
    return EagleDrafter(CONFIG, width, jnp.float32, **options)


def features_of(pair, tokens):
    """Returns the target's outputs at the head's feature layers, [b t l d], by one call."""
    b, t = tokens.shape
    cache = tiny.empty_cache(b, t)
    return pair.apply(pair.target, tokens, cache, hidden_layers=CONFIG.feature_layers)[1]


def chain_logits(pair, head, text, num_drafts):
    """Returns the logits [u] of a chain's calls after a text, and the greedy drafts.

    Each call is one from an empty cache over all pairs so far: no cache is carried.

    Args:
      pair: the tiny target.
      head: its head's parameters.
      text: ids, the newest one included.
      num_drafts: how many.
    """
    tokens = jnp.asarray(text, jnp.int32)[None]
    features = fuse(head, features_of(pair, tokens)[:, :-1])
    drafts, logits = [], []
    for _ in range(num_drafts):
        later = jnp.asarray([*text[1:], *drafts], jnp.int32)[None]
        empty = init_eagle_cache(CONFIG, batch_size=1, capacity=later.shape[1], dtype=jnp.float32)
        said, hidden, _ = apply_head(CONFIG, head, pair.target["embedding"][later], features, empty)
        logits.append(np.asarray(said[0, -1]))
        drafts.append(int(head["ids"][int(logits[-1].argmax())]))
        features = jnp.concatenate([features, hidden[:, -1:]], axis=1)
    return logits, drafts

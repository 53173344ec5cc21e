"""A tiny head with opinions for the tiny target, and what it says, computed the long way round."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafters.eagle import EagleDrafter
from jspec.drafters.eagle_head import (
    EagleConfig,
    apply_head,
    fuse,
    init_eagle_params,
    save_eagle,
)
from jspec.models import init_cache
from tests import tiny

_LONGEST = 160  # text of a chain
_apply_head = jax.jit(apply_head, static_argnums=0)
NUM_IDS = 40  # of the target's 61 tokens
CONFIG = EagleConfig(
    dataclasses.replace(tiny.CONFIG, num_layers=1, vocab_size=NUM_IDS), tiny.CONFIG.vocab_size,
    (0, 1, 2),
)  # fmt: skip


def params(seed=0, std=0.4, config=CONFIG):
    """Returns a head of large weights that cannot propose every third token."""
    shapes = jax.eval_shape(lambda key: init_eagle_params(config, key), jax.random.key(0))
    head = tiny.normal_weights(shapes, seed, std)
    ids = np.flatnonzero(np.arange(config.target_vocab_size) % 3 != 2)[: config.layer.vocab_size]
    return head | {"ids": jnp.asarray(ids, jnp.int32)}


@functools.cache
def params_for(pair):
    """Returns a head of which the target keeps some drafts.

    Its last matrix is fitted, by least squares, to what the target says of random texts.
    """
    head, dim = params(), CONFIG.layer.embed_dim
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 61, (32, 24)), jnp.int32)
    wanted = np.asarray(tiny.full_logits(pair, pair.target, tokens))[:, 1:, np.asarray(head["ids"])]
    # With the identity in the matrix's place the head says what the matrix reads.
    layer = dataclasses.replace(CONFIG.layer, vocab_size=dim)

    @jax.jit
    def run(features, tokens):
        reading = {"head": head["head"] | {"head": jnp.eye(dim)}}
        pairs = pair.target["embedding"][tokens[:, 1:]], fuse(head, features[:, :-1])
        empty = init_cache(CONFIG.layer, batch_size=32, capacity=23, dtype=jnp.float32)
        return apply_head(dataclasses.replace(CONFIG, layer=layer), reading, *pairs, empty)[0]

    read = run(features_of(pair, tokens), tokens)
    fitted = np.linalg.lstsq(np.reshape(read, (-1, dim)), np.reshape(wanted, (-1, NUM_IDS)))[0]
    return head | {"head": head["head"] | {"head": jnp.asarray(fitted.T)}}


def save_head(folder, target_config, **options):
    """Writes a head for a target of that shape; returns the folder as options have it."""
    num_ids = (2 * target_config.vocab_size + 1) // 3
    layer = dataclasses.replace(target_config, num_layers=1, vocab_size=num_ids)
    config = EagleConfig(layer, target_config.vocab_size, (0, target_config.num_layers))
    save_eagle(folder, config, params(config=config, **options))
    return str(folder)


def drafter(width, **options):
    """Returns the drafter of the head."""
    return EagleDrafter(
        width,
        tiny.CONFIG.vocab_size,
        CONFIG.target_vocab_size,
        config=CONFIG,
        dtype=jnp.float32,
        **options,
    )


def features_of(pair, tokens):
    """Returns the target's outputs at the head's feature layers, [b t l d]."""
    return tiny.outputs_of(pair, tokens, CONFIG.feature_layers)


def chain_logits(pair, head, text, num_drafts, used=61):
    """Returns the logits [u] of a chain's calls after a text, and the greedy drafts.

    Each call is one from an empty cache over all pairs so far: no cache is carried. Padding behind
    them, which they cannot see, makes all calls one program.

    Args:
      pair: the tiny target.
      head: its head's parameters.
      text: ids, the newest one included.
      num_drafts: how many.
      used: ids that are no padding.
    """
    tokens = np.zeros([1, _LONGEST], np.int32)
    tokens[0, : len(text)] = text
    features = np.array(jax.jit(fuse)(head, features_of(pair, tokens)))
    table, ids = np.asarray(pair.target["embedding"]), np.asarray(head["ids"])
    empty = init_cache(CONFIG.layer, batch_size=1, capacity=_LONGEST, dtype=jnp.float32)
    drafts, logits = [], []
    for last in range(len(text) - 2, len(text) - 2 + num_drafts):
        embedded = np.zeros_like(features)
        embedded[0, : last + 1] = table[[*text[1:], *drafts]]
        pairs = jnp.asarray(embedded), jnp.asarray(features)
        at = jnp.asarray(np.array([last], np.int32))
        said, hidden, _ = _apply_head(CONFIG, head, *pairs, empty, logits_at=at)
        logits.append(np.where(ids < used, np.asarray(said)[0, 0], -np.inf))
        drafts.append(int(ids[logits[-1].argmax()]))
        features[0, last + 1] = np.asarray(hidden)[0, last]
    return logits, drafts

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
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        noise = std * rng.normal(size=leaf.shape)
        return jnp.asarray(1 + noise if path[-1].key == "scale" else noise, jnp.float32)

    head = jax.tree_util.tree_map_with_path(draw, shapes)
    ids = np.flatnonzero(np.arange(config.target_vocab_size) % 3 != 2)[: config.layer.vocab_size]
    return head | {"ids": jnp.asarray(ids, jnp.int32)}


def params_for(pair):
    """Returns a head of which the target keeps some drafts.

    Its last matrix is fitted, by least squares, to what the target says of random texts.
    """
    head, dim = params(), CONFIG.layer.embed_dim
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 61, (32, 24)), jnp.int32)
    wanted = tiny.full_logits(pair, pair.target, tokens)[:, 1:, head["ids"]]
    # With the identity in the matrix's place the head says what the matrix reads.
    layer = dataclasses.replace(CONFIG.layer, vocab_size=dim)
    reading = {"head": head["head"] | {"head": jnp.eye(dim)}}
    pairs = pair.target["embedding"][tokens[:, 1:]], fuse(head, features_of(pair, tokens)[:, :-1])
    empty = init_cache(CONFIG.layer, batch_size=32, capacity=23, dtype=jnp.float32)
    read = apply_head(dataclasses.replace(CONFIG, layer=layer), reading, *pairs, empty)[0]
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
    """Returns the target's outputs at the head's feature layers, [b t l d], by one call."""
    return _features_of(pair.apply, pair.target, tokens)


@functools.partial(jax.jit, static_argnums=0)
def _features_of(apply, params, tokens):
    cache = tiny.empty_cache(*tokens.shape)
    return apply(params, tokens, cache, hidden_layers=CONFIG.feature_layers)[1]


def chain_logits(pair, head, text, num_drafts):
    """Returns the logits [u] of a chain's calls after a text, and the greedy drafts.

    Each call is one from an empty cache over all pairs so far: no cache is carried. Padding behind
    them, which they cannot see, makes all calls one program.

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
        embedded = pair.target["embedding"][later]
        last = later.shape[1] - 1
        room = ((0, 0), (0, _LONGEST - last - 1), (0, 0))
        empty = init_cache(CONFIG.layer, batch_size=1, capacity=_LONGEST, dtype=jnp.float32)
        said, hidden, _ = _apply_head(
            CONFIG, head, jnp.pad(embedded, room), jnp.pad(features, room), empty,
            logits_at=jnp.array([last]),
        )  # fmt: skip
        logits.append(np.asarray(said[0, 0]))
        drafts.append(int(head["ids"][int(logits[-1].argmax())]))
        features = jnp.concatenate([features, hidden[:, last : last + 1]], axis=1)
    return logits, drafts

"""Tiny heads of DFlash and DSpark for the tiny target, and what they say, with numpy alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from jspec.drafters.dflash import DflashDrafter
from jspec.drafters.dflash_head import (
    DflashConfig,
    block_logits,
    embed_block,
    fuse,
    init_dflash_params,
    read_block,
    read_context,
    save_dflash,
)
from jspec.models import init_cache, make_apply
from jspec.models.layers import head_kernel
from tests import tiny

NAME = "dflash"


def make_config(target, num_layers=2, **fields):
    """Returns the shape of a head for a target of that shape."""
    layer = dataclasses.replace(
        target, num_layers=num_layers, family="qwen3", qk_norm="head", tie_embeddings=False,
        bos_id=None, eos_ids=(),
    )  # fmt: skip
    usual = {"feature_layers": (0, target.num_layers), "block_size": 8, "mask_id": None}
    return DflashConfig(
        layer, target.vocab_size, **usual | {"target_num_layers": target.num_layers} | fields
    )


CONFIG = make_config(tiny.CONFIG, feature_layers=(0, 1, 2))


def params(config=CONFIG, seed=0, std=0.4):
    """Returns a head of large weights; with a cut vocabulary it lacks every third token."""
    shapes = jax.eval_shape(lambda key: init_dflash_params(config, key), jax.random.key(0))
    head = tiny.normal_weights(shapes, seed, std)
    if config.is_cut:
        ids = np.flatnonzero(np.arange(config.target_vocab_size) % 3 != 2)
        head |= {"ids": jnp.asarray(ids[: config.layer.vocab_size], jnp.int32)}
    return head


@functools.cache
def params_for(pair):
    """Returns a head of which the target keeps some drafts."""
    return fitted(CONFIG, pair.config, pair.target)


def fitted(config, target_config, target, num_steps=150):
    """Returns a head after some steps of gradient descent on what the target says."""
    b, s = 48, 20
    tokens = np.random.default_rng(1).integers(0, target_config.vocab_size, (b, s))
    tokens = jnp.asarray(tokens, jnp.int32)
    cache = init_cache(target_config, batch_size=b, capacity=s, dtype=jnp.float32)
    apply = tiny.one_program(make_apply(target_config))
    logits, hidden, _ = apply(target, tokens, cache, hidden_layers=config.feature_layers)
    wanted = jnp.asarray(scipy.special.softmax(np.asarray(logits)[:, 8:11], axis=-1))

    def loss(head):
        empty = init_cache(config.layer, batch_size=b, capacity=s, dtype=jnp.float32)
        context = read_context(config, head, fuse(config, head, hidden[:, :8]), empty)
        context = context.commit(jnp.full([b], 8))
        block = embed_block(config, head, target, tokens[:, 8], 4)
        said, _ = read_block(config, head, block, context)
        said = block_logits(config, head, target_config, target, said)
        said = said[:, :3] if config.says_next else said[:, 1:]
        return -jnp.sum(wanted * jax.nn.log_softmax(said), axis=-1).mean()

    @jax.jit
    def descend(head):
        def step(_, carry):
            head, moment = carry
            slope = jax.grad(loss, allow_int=True)(head)
            moment = jax.tree.map(
                lambda m, g: m if g.dtype == jax.dtypes.float0 else 0.9 * m + g, moment, slope
            )
            head = jax.tree.map(
                lambda leaf, m: leaf if leaf.dtype == jnp.int32 else leaf - 0.02 * m, head, moment
            )
            return head, moment

        return jax.lax.fori_loop(0, num_steps, step, (head, jax.tree.map(jnp.zeros_like, head)))[0]

    return descend(params(config, std=0.2))


def save_head(folder, target_config, target=None, **options):
    """Writes a head for a target of that shape; returns the folder as options have it.

    With the target's parameters it is one of which that keeps some drafts.
    """
    config = make_config(target_config)
    is_fitted = target is not None
    head = fitted(config, target_config, target) if is_fitted else params(config, **options)
    save_dflash(folder, config, head)
    return str(folder)


def drafter(width, config=CONFIG, target=tiny.CONFIG, **options):
    """Returns the drafter of the head."""
    size = target.vocab_size
    return DflashDrafter(
        width, size, size, config=config, target=target, dtype=jnp.float32, **options
    )


def features_of(pair, tokens, config=CONFIG):
    """Returns the target's outputs at the head's feature layers, [b t l d]."""
    return tiny.outputs_of(pair, tokens, config.feature_layers)


def reference_hidden(config, head, target, hidden, last, num_slots):
    """Returns the normed outputs [t d] of one row's block, by numpy: one attention over all.

    Args:
      config: the head's.
      head: its parameters.
      target: the target's.
      hidden: the target's outputs at the head's feature layers, [s l d].
      last: the newest token.
      num_slots: of the block.
    """
    cfg, head = config.layer, jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), head)
    groups, size = cfg.num_groups, cfg.head_dim

    def norm(x, scale):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + cfg.norm_epsilon) * scale

    def rotate(x, positions):  # [t n h]
        angles = positions[:, None] / cfg.rope_theta ** (np.arange(0, size, 2) / size)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    hidden = np.asarray(hidden, np.float64)
    context = norm(hidden.reshape(len(hidden), -1) @ head["fc"].T, head["feature_norm"]["scale"])
    table = head["embedding"] if config.has_embedding else np.asarray(target["embedding"], float)
    mask = head["mask"] if config.mask_id is None else table[config.mask_id]
    x = np.stack([table[last], *[mask] * (num_slots - 1)]) * cfg.embedding_scale
    before, total = len(context), len(context) + num_slots
    for index in range(cfg.num_layers):
        layer = head[f"layers_{index}"]
        kernel = layer["attention"]["qkv"]
        normed = norm(x, layer["attention_norm"]["scale"])
        inputs = np.concatenate([context, normed])
        queries = np.einsum("ti,kghi->tkgh", normed, kernel[:, :groups]).reshape(
            num_slots, -1, size
        )
        keys = np.einsum("ti,khi->tkh", inputs, kernel[:, groups])
        values = np.einsum("ti,khi->tkh", inputs, kernel[:, groups + 1])
        queries = norm(queries, layer["attention"]["query_norm"]["scale"])
        keys = norm(keys, layer["attention"]["key_norm"]["scale"])
        queries = rotate(queries, np.arange(before, total))
        keys = rotate(keys, np.arange(total)).repeat(groups, axis=1)
        scores = np.einsum("tnh,snh->nts", queries, keys) / np.sqrt(size)
        query_places, key_places = np.arange(before, total)[:, None], np.arange(total)
        seen = np.ones_like(scores[0], bool)
        if index in config.causal_layers:
            seen &= key_places <= query_places
        if cfg.window_of(index) is not None:
            seen &= query_places - key_places < cfg.window_of(index)
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = np.einsum("nts,snh->tnh", weights, values.repeat(groups, axis=1))
        x = x + mixed.reshape(num_slots, -1) @ layer["attention"]["out"].T
        normed = norm(x, layer["mlp_norm"]["scale"])
        gate, up = np.einsum("td,pfd->ptf", normed, layer["mlp"]["gate_up"])
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp"]["down"].T
    return norm(x, head["final_norm"]["scale"])


def reference_logits(config, head, target_config, target, hidden, last, num_drafts):
    """Returns the logits of the drafts before any Markov head, [w u], and what the head reads."""
    num_slots = config.num_slots(num_drafts)
    said = reference_hidden(config, head, target, hidden, last, num_slots)[-num_drafts:]
    kernel = head["head"] if config.has_head else head_kernel(target_config, target)
    logits = said @ np.asarray(kernel, np.float64).T * config.layer.logits_scale
    if config.layer.logits_softcap is not None:
        cap = config.layer.logits_softcap
        logits = cap * np.tanh(logits / cap)
    return logits, said

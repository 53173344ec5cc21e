"""A tiny head of P-EAGLE for the tiny target, and what it says, by numpy from published names."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import scipy.special

from jspec.drafters.eagle import ParallelEagleDrafter
from jspec.drafters.eagle_head import EagleConfig, save_eagle
from tests import tiny, tiny_eagle

CONFIG = EagleConfig(
    dataclasses.replace(tiny_eagle.CONFIG.layer, num_layers=2), tiny.CONFIG.vocab_size,
    tiny_eagle.CONFIG.feature_layers, has_embedding=True, mask_id=60,
)  # fmt: skip


def params(config=CONFIG, std=0.4):
    """Returns a head of large weights."""
    return tiny_eagle.params(std=std, config=config)


def save_head(folder, target, **options):
    """Writes a head for a target of that shape; returns the folder as options have it."""
    size = (2 * target.vocab_size + 1) // 3
    layer = dataclasses.replace(target.as_llama(), num_mtp_layers=0, vocab_size=size)
    config = EagleConfig(layer, target.vocab_size, (0, 1, 2), has_embedding=True, mask_id=3)
    save_eagle(folder, config, params(config, **options))
    return str(folder)


def drafter(width, config=CONFIG, kind=ParallelEagleDrafter, target=tiny.CONFIG, **options):
    """Returns the drafter of a head."""
    size = target.vocab_size
    return kind(width, size, size, config=config, dtype=jnp.float32, **options)


def reference_stream(head, config, wide, embedded):
    """Returns what pairs have become after the last layer, [n d], by numpy: one attention over all.

    Args:
      head: tensors as published, by name, with `midlayer.` for the first layer.
      config: the head's.
      wide: the target's outputs at its feature layers, side by side, [n l·d].
      embedded: the later tokens, [n d].
    """
    head = {name: np.asarray(tensor, np.float64) for name, tensor in head.items()}
    cfg, total = config.layer, len(wide)
    size = cfg.head_dim

    def norm(x, name):
        return normed(head, config, x, name)

    def rotate(x):
        angles = np.arange(total)[:, None] / cfg.rope_theta ** (np.arange(0, size, 2) / size)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def attend(x, layer):
        queries, keys, values = (
            (x @ head[f"{layer}.self_attn.{part}_proj.weight"].T).reshape(total, -1, size)
            for part in "qkv"
        )
        keys, values = (part.repeat(cfg.num_groups, axis=1) for part in (rotate(keys), values))
        scores = np.einsum("tnh,snh->nts", rotate(queries), keys) / np.sqrt(size)
        scores = np.where(np.tri(total, dtype=bool), scores, -np.inf)
        weights = scipy.special.softmax(scores, axis=-1)
        mixed = np.einsum("nts,snh->tnh", weights, values).reshape(total, -1)
        return mixed @ head[f"{layer}.self_attn.o_proj.weight"].T

    def feed_forward(x, layer):
        inner = norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (inner @ head[f"{layer}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        return (gate / (1 + np.exp(-gate)) * up) @ head[f"{layer}.mlp.down_proj.weight"].T

    if config.has_input_norm:
        wide = norm(wide, "input_norm")
    x = wide @ head["fc.weight"].T
    feature = norm(x, "midlayer.hidden_norm")
    if config.has_residual_norm:
        x = feature
    pair = np.concatenate([norm(embedded, "midlayer.input_layernorm"), feature], axis=-1)
    x = x + attend(pair, "midlayer")
    x = x + feed_forward(x, "midlayer")
    for index in range(1, cfg.num_layers):
        layer = f"layers.{index}"
        x = x + attend(norm(x, f"{layer}.input_layernorm"), layer)
        x = x + feed_forward(x, layer)
    return x


def normed(head, config, x, name):
    """Returns the rows of `x` after the norm of that name."""
    root = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config.layer.norm_epsilon)
    return x / root * head[f"{name}.weight"]


def reference_logits(head, config, outputs, text, num_drafts):
    """Returns the logits [w u] of all drafts after a text by numpy.

    Args:
      head: see `reference_stream`.
      config: the head's.
      outputs: the target's at its feature layers, of all tokens but the newest, [n-1 l d].
      text: ids, the newest included, [n].
      num_drafts: how many.
    """
    num_masks = num_drafts - 1
    masks = np.repeat(head["mask_hidden"].reshape(1, -1), num_masks, axis=0)
    wide = np.concatenate([np.asarray(outputs, np.float64).reshape(len(text) - 1, -1), masks])
    embedded = head["embed_tokens.weight"][[*text[1:], *[config.mask_id] * num_masks]]
    x = reference_stream(head, config, wide, embedded)
    return normed(head, config, x[-num_drafts:], "norm") @ head["lm_head.weight"].T

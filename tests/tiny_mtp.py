"""A tiny target with a layer for multi-token prediction, and what the layer says, by numpy."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jspec.drafters.mtp import MtpDrafter
from tests import tiny

CONFIG = dataclasses.replace(tiny.CONFIG, family="mimo", qkv_bias=True, num_mtp_layers=1)


def drafter(width, config=CONFIG, kind=MtpDrafter, **options):
    """Returns the drafter of the layer."""
    size = config.vocab_size
    return kind(width, size, size, config=config, dtype=jnp.float32, **options)


def reference_outputs(tensors, config, hidden, tokens):
    """Returns the layer's outputs [n d] for pairs by numpy: one attention over all of them.

    Args:
      tensors: as published, by name.
      config: keys of config.json.
      hidden: of the earlier tokens, normed, or the layer's own outputs, [n d].
      tokens: the later ones, [n].
    """
    layer = {
        name.removeprefix("model.mtp_layers.0."): np.asarray(tensor, np.float64)
        for name, tensor in tensors.items()
        if name.startswith("model.mtp_layers.0.")
    }
    num, heads, size = len(tokens), config["num_attention_heads"], config["head_dim"]

    def norm(x, name):
        scale = layer[f"{name}.weight"]
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config["rms_norm_eps"]) * scale

    def project(x, part):
        name = f"self_attn.{part}_proj"
        return (x @ layer[f"{name}.weight"].T + layer[f"{name}.bias"]).reshape(num, -1, size)

    def rotate(x):
        angles = np.arange(num)[:, None] / config["theta"] ** (np.arange(0, size, 2) / size)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    embedded = np.asarray(tensors["model.embed_tokens.weight"], np.float64)[tokens]
    embedded[0] = 0  # as vLLM and SGLang have it
    parts = norm(hidden, "hidden_layernorm"), norm(embedded, "token_layernorm")
    x = np.concatenate(parts, axis=-1) @ layer["input_proj.weight"].T
    normed = norm(x, "input_layernorm")
    queries, keys, values = (project(normed, part) for part in "qkv")
    keys, values = (t.repeat(heads // t.shape[1], axis=1) for t in (rotate(keys), values))
    scores = np.einsum("tnh,snh->nts", rotate(queries), keys) / np.sqrt(size)
    scores = np.where(np.tri(num, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = np.einsum("nts,snh->tnh", weights, values).reshape(num, -1)
    x = x + mixed @ layer["self_attn.o_proj.weight"].T
    normed = norm(x, "post_attention_layernorm")
    gate, up = (normed @ layer[f"mlp.{part}_proj.weight"].T for part in ("gate", "up"))
    x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj.weight"].T
    return norm(x, "final_layernorm")


def reference_logits(tensors, config, hidden, text, drafts):
    """Returns the logits [w v] of drafts after a text, each after those before it, by numpy.

    Args:
      tensors: as published, by name.
      config: keys of config.json.
      hidden: the target's, after its norm, of all tokens of the text but the newest, [n-1 d].
      text: ids, the newest included, [n].
      drafts: ids, [w].
    """
    hidden, logits = np.asarray(hidden, np.float64), []
    for index in range(len(drafts)):
        tokens = np.array([*text[1:], *drafts[:index]])
        outputs = reference_outputs(tensors, config, hidden, tokens)
        logits.append(outputs[-1] @ np.asarray(tensors["lm_head.weight"], np.float64).T)
        hidden = np.concatenate([hidden, outputs[-1:]])
    return np.stack(logits)

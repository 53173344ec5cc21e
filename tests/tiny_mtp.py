"""A tiny target with a layer for multi-token prediction, and what the layer says, by numpy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafters.mtp import MtpDrafter
from jspec.models import init_cache, make_apply
from jspec.models.decoder import apply_mtp, mtp_config
from jspec.models.layers import normed_outputs
from tests import tiny

CONFIG = dataclasses.replace(tiny.CONFIG, family="mimo", qkv_bias=True, num_mtp_layers=1)
apply = tiny.one_program(make_apply(CONFIG))


def empty_cache(batch_size, capacity):
    """Returns an empty float32 cache of the target."""
    return init_cache(CONFIG, batch_size=batch_size, capacity=capacity, dtype=jnp.float32)


@functools.cache
def params(num_steps=60):
    """Returns a target of which the layer learned a little, so that some drafts are kept."""
    target = tiny.random_params(CONFIG, seed=0, std=0.4)
    small = tiny.random_params(CONFIG, seed=0, std=0.2)
    b, s = 24, 20
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 61, (b, s)), jnp.int32)
    logits, hidden, _ = apply(target, tokens, empty_cache(b, s))
    wanted = jax.nn.softmax(logits[:, 1:])

    def loss(layer):
        embedded = target["embedding"][tokens[:, 1:]]
        said, _ = apply_mtp(
            CONFIG, {"mtp": layer}, embedded, hidden[:, :-1], empty_layer_cache(b, s)
        )
        log_probs = jax.nn.log_softmax(said @ target["head"].T)
        return -jnp.sum(wanted * log_probs, axis=-1).mean()

    @jax.jit
    def descend(layer):
        def step(_, carry):
            layer, moment = carry
            slope = jax.grad(loss)(layer)
            moment = jax.tree.map(lambda m, g: 0.9 * m + g, moment, slope)
            return jax.tree.map(lambda leaf, m: leaf - 0.02 * m, layer, moment), moment

        start = layer, jax.tree.map(jnp.zeros_like, layer)
        return jax.lax.fori_loop(0, num_steps, step, start)[0]

    return target | {"mtp": descend(small["mtp"])}


def empty_layer_cache(batch_size, capacity):
    """Returns an empty float32 cache of the layer."""
    shape = {"batch_size": batch_size, "capacity": capacity, "dtype": jnp.float32}
    return init_cache(mtp_config(CONFIG), **shape)


def drafter(width, config=CONFIG, kind=MtpDrafter, **options):
    """Returns the drafter of the layer."""
    size = config.vocab_size
    return kind(width, size, size, config=config, dtype=jnp.float32, **options)


@jax.jit
def fresh_cache(target, tokens):
    """Returns the layer's cache of one call on all pairs of texts [b s], the newest included."""
    b, s = tokens.shape
    outputs = apply(target, tokens, empty_cache(b, s), hidden_layers=(CONFIG.num_layers,))[1]
    hidden = normed_outputs(CONFIG, target, outputs[:, :-1, 0])
    embedded = target["embedding"][tokens[:, 1:]]
    return apply_mtp(CONFIG, target, embedded, hidden, empty_layer_cache(b, s - 1))[1]


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

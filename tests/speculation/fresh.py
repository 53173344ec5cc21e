"""What the memories of drafters over the layered target should hold, made by one pass of a text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafters import dflash_head
from jspec.drafters.eagle_head import apply_head, fuse
from jspec.models import init_cache, make_apply
from jspec.models.decoder import apply_mtp, mtp_config
from jspec.models.layers import normed_outputs
from tests import layered


@functools.cache
def jit_prefill(layers):
    """Returns a function from parameters and tokens [b s] to the cache of one pass over them."""
    apply = make_apply(layered.CONFIG, layers)

    def prefill(params, tokens):
        return apply(params, tokens, layered.empty_cache(*tokens.shape, layers))[2]

    return jax.jit(prefill)


@functools.cache
def jit_outputs(layers):
    """Returns a function from tokens [b s] to the target's outputs at those layers, [b s l d]."""

    def run(tokens):
        empty = layered.empty_cache(*tokens.shape)
        return layered.apply(layered.params(), tokens, empty, hidden_layers=layers)[1]

    return jax.jit(run)


@functools.cache
def jit_prefill_head(config):
    """Returns a function from a head of EAGLE and tokens [b s] to its cache of all their pairs."""

    def prefill(params, tokens):
        features = fuse(params, jit_outputs(config.feature_layers)(tokens))[:, :-1]
        table = (params if config.has_embedding else layered.params())["embedding"]
        embedded = table[tokens[:, 1:]]
        b, s = tokens.shape
        empty = init_cache(config.layer, batch_size=b, capacity=s, dtype=jnp.float32)
        return apply_head(config, params, embedded, features, empty)[2]

    return jax.jit(prefill)


@functools.cache
def jit_prefill_mtp(config):
    """Returns a function from a target and tokens [b s] to its layer's cache of all their pairs."""

    def prefill(params, tokens):
        outputs = jit_outputs((config.num_layers,))(tokens)[:, :-1, 0]
        embedded, (b, s) = params["embedding"][tokens[:, 1:]], tokens.shape
        empty = init_cache(mtp_config(config), batch_size=b, capacity=s, dtype=jnp.float32)
        return apply_mtp(config, params, embedded, normed_outputs(config, params, outputs), empty)[
            1
        ]

    return jax.jit(prefill)


@functools.cache
def jit_prefill_block_head(config):
    """Returns a function from a head of DFlash and tokens [b s] to its cache of all features."""

    def prefill(params, tokens):
        features = dflash_head.fuse(config, params, jit_outputs(config.feature_layers)(tokens))
        b, s = tokens.shape
        empty = init_cache(config.layer, batch_size=b, capacity=s, dtype=jnp.float32)
        return dflash_head.read_context(config, params, features, empty)

    return jax.jit(prefill)


def padded(texts, capacity):
    """Returns the texts as tokens, [b s]."""
    tokens = np.zeros([len(texts), capacity], np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    return tokens

"""Tiny heads of blockwise decoding, and what they say, computed with numpy alone."""

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafters.blockwise import (
    BlockwiseConfig,
    BlockwiseDrafter,
    init_blockwise_params,
    save_blockwise,
)
from jspec.models.layers import head_kernel
from tests import tiny

NAME = "blockwise"
CONFIG = BlockwiseConfig(tiny.CONFIG.embed_dim, hidden_dim=12, num_heads=4)


def params(config=CONFIG, seed=0, std=0.1):
    """Returns heads of opinions."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: leaf + jnp.asarray(std * rng.normal(size=leaf.shape), jnp.float32),
        init_blockwise_params(config, jax.random.key(seed)),
    )


def params_for(pair):
    """Returns heads of which the target keeps some drafts."""
    del pair
    return params()


def save_head(folder, target_config, **options):
    """Writes heads for a target of that shape; returns the folder as options have it."""
    config = BlockwiseConfig(target_config.embed_dim, hidden_dim=8, num_heads=4)
    save_blockwise(folder, config, params(config, **options), target_config)
    return str(folder)


def drafter(width):
    """Returns the drafter of the heads."""
    return BlockwiseDrafter(
        width, tiny.CONFIG.vocab_size, tiny.CONFIG.vocab_size, config=CONFIG, target=tiny.CONFIG
    )


def logits_of(pair, heads, hidden):
    """Returns what every head says of a last hidden state [d], [h v]."""
    heads = jax.tree.map(np.asarray, heads)
    inner = np.maximum(heads["up"]["kernel"] @ hidden + heads["up"]["bias"], 0)
    downs = [heads[f"down_{index}"] for index in range(CONFIG.num_heads)]
    outputs = [hidden + down["kernel"] @ inner + down["bias"] for down in downs]
    return np.stack(outputs) @ np.asarray(head_kernel(pair.config, pair.target)).T

"""Tiny heads of Medusa for the tiny target, and what they say, computed with numpy alone."""

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafters.medusa import MedusaConfig, MedusaDrafter, init_medusa_params, save_medusa
from jspec.models.layers import head_kernel
from tests import tiny

NAME = "medusa"
CONFIG = MedusaConfig(
    tiny.CONFIG.embed_dim, tiny.CONFIG.vocab_size, num_heads=4, num_layers=2
)  # fmt: skip


def params(config=CONFIG, head=None, seed=0, std=0.3):
    """Returns heads of opinions: the target's head, disturbed, or noise."""
    rng = np.random.default_rng(seed)
    if head is None:
        head = jnp.asarray(rng.normal(size=(config.vocab_size, config.embed_dim)), jnp.float32)
    return jax.tree.map(
        lambda leaf: leaf + jnp.asarray(std * rng.normal(size=leaf.shape), jnp.float32),
        init_medusa_params(config, head),
    )


def params_for(pair):
    """Returns heads near the target's head, of which it keeps some drafts."""
    return params(head=head_kernel(pair.config, pair.target), std=0.1)


def save_head(folder, target_config, **options):
    """Writes heads for a target of that shape; returns the folder as options have it."""
    config = MedusaConfig(target_config.embed_dim, target_config.vocab_size, num_heads=4)
    save_medusa(folder, config, params(config, **options), target_config)
    return str(folder)


def drafter(width, **options):
    """Returns the drafter of the heads."""
    vocab_size = tiny.CONFIG.vocab_size
    return MedusaDrafter(
        width, vocab_size, tiny.CONFIG.vocab_size, config=CONFIG, target=tiny.CONFIG, **options
    )


def logits_of(pair, heads, hidden, num_layers=CONFIG.num_layers):
    """Returns what every head says of a last hidden state [d], [h v]."""
    del pair
    logits = []
    for index in range(CONFIG.num_heads):
        head, x = jax.tree.map(np.asarray, heads[f"head_{index}"]), hidden
        for layer in range(num_layers):
            inner = head[f"layer_{layer}"]["kernel"] @ x + head[f"layer_{layer}"]["bias"]
            x = x + inner / (1 + np.exp(-inner))
        logits.append(head["head"] @ x)
    return np.stack(logits)

"""A pair of tiny Llamas that have opinions and disagree, for the distributions of the core."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models import DecoderConfig, init_cache, init_params, make_apply

CONFIG = DecoderConfig(
    vocab_size=61, embed_dim=32, hidden_dim=48, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=6, max_seq_len=256, rope_theta=777.0, norm_epsilon=1e-4,
)  # fmt: skip


class TinyPair(NamedTuple):
    """A target and a draft, which is the target disturbed.

    Attributes:
      config: of both models.
      apply: of both models.
      target: the target's parameters.
      draft: the draft's.
    """

    config: DecoderConfig
    apply: object
    target: dict
    draft: dict


def random_params(config: DecoderConfig, seed: int, std: float) -> dict:
    """Returns normal weights; norm scales lie about 1."""
    shapes = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    rng = np.random.default_rng(seed)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        noise = std * rng.normal(size=leaf.shape)
        return jnp.asarray(1 + noise if path[-1].key == "scale" else noise, jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def make_tiny_pair() -> TinyPair:
    """Returns the pair, after checking that it can prove anything."""
    target = random_params(CONFIG, seed=0, std=0.4)
    noise = random_params(CONFIG, seed=1, std=0.4)
    draft = jax.tree.map(lambda a, b: a + 0.12 * b, target, noise)
    pair = TinyPair(CONFIG, make_apply(CONFIG), target, draft)
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 61, (8, 24)), jnp.int32)
    probs = [jax.nn.softmax(full_logits(pair, params, tokens)) for params in (target, draft)]
    entropy = -jnp.sum(probs[0] * jnp.log(jnp.maximum(probs[0], 1e-30)), axis=-1).mean()
    distance = 0.5 * jnp.abs(probs[0] - probs[1]).sum(axis=-1).mean()
    assert entropy <= 0.7 * np.log(CONFIG.vocab_size), f"the target has no opinions: {entropy}"
    assert 0.2 <= distance <= 0.8, f"draft and target should differ, not wholly: {distance}"
    return pair


def full_logits(pair: TinyPair, params: dict, tokens: jax.Array) -> jax.Array:
    """Returns the logits of one call from an empty cache."""
    cache = empty_cache(tokens.shape[0], tokens.shape[1])
    return jax.jit(pair.apply)(params, tokens, cache)[0]


def empty_cache(batch_size: int, capacity: int):
    """Returns an empty float32 cache."""
    return init_cache(CONFIG, batch_size=batch_size, capacity=capacity, dtype=jnp.float32)

"""A pair of tiny Llamas that have opinions and disagree, for the distributions of the core."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from jspec.common.typing import ApplyFn, Params
from jspec.models import DecoderConfig, init_cache, init_params, make_apply

CONFIG = DecoderConfig(
    vocab_size=61, embed_dim=32, hidden_dim=48, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=6, max_seq_len=256, rope_theta=777.0, norm_epsilon=1e-4,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class TinyPair:
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


def one_program(apply: ApplyFn) -> ApplyFn:
    """Returns the model compiled as one program where it is called outside of any.

    Operation by operation it would be some forty. Within a program it is traced into it, as ever.
    """
    return jax.jit(apply, static_argnames=("hidden_layers", "first_layer"), inline=True)


def random_params(config: DecoderConfig, seed: int, std: float) -> dict:
    """Returns normal weights; norm scales lie about 1."""
    shapes = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    return normal_weights(shapes, seed, std)


def normal_weights(shapes: Params, seed: int, std: float) -> Params:
    """Returns normal weights of those shapes; norm scales lie about 1."""
    rng = np.random.default_rng(seed)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        noise = std * rng.normal(size=leaf.shape)
        values = 1 + noise if path[-1].key == "scale" else noise
        return jnp.asarray(values.astype(np.float32))

    return jax.tree_util.tree_map_with_path(draw, shapes)


def make_tiny_pair() -> TinyPair:
    """Returns the pair, after checking that it can prove anything."""
    target = random_params(CONFIG, seed=0, std=0.4)
    noise = random_params(CONFIG, seed=1, std=0.4)
    draft = jax.tree.map(
        lambda a, b: jnp.asarray(np.asarray(a) + 0.12 * np.asarray(b)), target, noise
    )
    pair = TinyPair(CONFIG, one_program(make_apply(CONFIG)), target, draft)
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 61, (8, 24)), jnp.int32)
    logits = [np.asarray(full_logits(pair, params, tokens)) for params in (target, draft)]
    probs = [scipy.special.softmax(table, axis=-1) for table in logits]
    entropy = -np.sum(probs[0] * np.log(np.maximum(probs[0], 1e-30)), axis=-1).mean()
    distance = 0.5 * np.abs(probs[0] - probs[1]).sum(axis=-1).mean()
    assert entropy <= 0.7 * np.log(CONFIG.vocab_size), f"the target has no opinions: {entropy}"
    assert 0.2 <= distance <= 0.8, f"draft and target should differ, not wholly: {distance}"
    return pair


def full_logits(pair: TinyPair, params: dict, tokens: jax.Array) -> jax.Array:
    """Returns the logits of one call from an empty cache."""
    cache = empty_cache(tokens.shape[0], tokens.shape[1])
    return pair.apply(params, tokens, cache)[0]


def outputs_of(pair: TinyPair, tokens: np.ndarray, layers: tuple[int, ...]) -> jax.Array:
    """Returns the target's outputs after those layers, [b t l d], by one call.

    Padding behind the tokens, which they cannot see, makes texts of many lengths one program.
    """
    tokens = np.asarray(tokens)
    padded = jnp.asarray(np.pad(tokens, ((0, 0), (0, -tokens.shape[1] % 80))))
    outputs = pair.apply(pair.target, padded, empty_cache(*padded.shape), hidden_layers=layers)[1]
    return jnp.asarray(np.asarray(outputs)[:, : tokens.shape[1]])


def empty_cache(batch_size: int, capacity: int):
    """Returns an empty float32 cache."""
    return init_cache(CONFIG, batch_size=batch_size, capacity=capacity, dtype=jnp.float32)

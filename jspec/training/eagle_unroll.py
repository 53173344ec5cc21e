"""A head of EAGLE-3 as it drafts, after every position of a text at once: training-time test.

A chain of drafts that begins after token i + 1 calls the head on (feature i, token i + 1), and then
on its own output in the feature's place. Step s of all chains is one call here:

    step 0   (f0 t1)  (f1 t2)  (f2 t3) ...     each sees the pairs up to its own
    step 1   (h0 t2)  (h1 t3)  (h2 t4) ...     each sees the pairs that its chain saw at step 0, and
    step 2   (h0 t3)  (h1 t4)  (h2 t5) ...     its own chain's later pairs

The tokens are the text's: a chain matters only as long as its drafts are accepted
(arXiv 2503.01840, section 3.2).
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from jspec.common.typing import Params
from jspec.drafters.eagle_head import EagleConfig, fuse
from jspec.kernels import apply_rope
from jspec.models import DecoderConfig
from jspec.models.layers import FeedForward, RMSNorm, linear, rope_cos_sin
from jspec.training.packing import Rows, shift_left
from jspec.training.target_states import TargetStates

_MASKED = -1e30


def unroll(
    config: EagleConfig,
    params: Params,
    rows: Rows,
    states: TargetStates,
    num_steps: int,
) -> list[Float32[Array, "b t d"]]:
    """Returns the head's outputs, normed, at every position and each of a chain's calls.

    From index i of those of step s the head predicts token i + 2 + s; the last 2 + s positions of a
    text have no meaning.
    """
    mlp, norm = FeedForward(config.layer), RMSNorm(config.layer.norm_epsilon)
    head, visible = params["head"], rows.visible()

    def normed(name: str, inputs: Array) -> Any:
        return norm.apply({"params": head[name]}, inputs)

    hidden = fuse(params, states.features)
    pairs, outputs = [], []
    for step in range(num_steps):
        tokens = shift_left(states.embedded.astype(jnp.float32), 1 + step)
        halves = [normed("embedding_norm", tokens), normed("feature_norm", hidden)]
        inputs = jnp.concatenate(halves, axis=-1)
        positions = jnp.asarray(rows.positions) + step
        queries, *pair = _project(config.layer, head["attention"], inputs, positions)
        pairs.append(pair)
        hidden = hidden + _attend(config.layer, head["attention"], queries, pairs, visible)
        hidden = hidden + mlp.apply({"params": head["mlp"]}, normed("mlp_norm", hidden))  # type: ignore
        outputs.append(normed("final_norm", hidden))
    return outputs


def _project(
    config: DecoderConfig, params: Params, inputs: Float32[Array, "b t i"], positions: Array
) -> tuple[Float32[Array, "b t k g h"], Float32[Array, "b t k h"], Float32[Array, "b t k h"]]:
    """Returns the queries, scaled, the keys and the values of one step."""
    b, t = inputs.shape[:2]
    k, g, h = config.num_kv_heads, config.num_groups, config.head_dim
    qkv = linear(inputs, params["qkv"])
    if config.qkv_bias:
        qkv += params["qkv_bias"]
    rope = rope_cos_sin(config, positions)
    rotated = apply_rope(qkv[:, :, :, : g + 1].reshape(b, t, k * (g + 1), h), *rope)
    rotated = rotated.reshape(b, t, k, g + 1, h)
    return rotated[:, :, :, :g] * h**-0.5, rotated[:, :, :, g], qkv[:, :, :, g + 1]


def _attend(
    config: DecoderConfig,
    params: Params,
    queries: Float32[Array, "b t k g h"],
    pairs: Sequence[Sequence[Float32[Array, "b t k h"]]],
    visible: Bool[Array, "b t t"],
) -> Float32[Array, "b t d"]:
    """Returns the attention to the pairs of step 0 that a position sees and to its chain."""
    # The softmax over both is assembled from its parts, so that no array holds all scores.
    (keys, values), *chain_pairs = pairs
    scores = jnp.einsum("btkgh,bskh->bkgts", queries, keys)
    scores = jnp.where(visible[:, None, None], scores, _MASKED)
    chain_scores = [
        jnp.einsum("btkgh,btkh->bkgt", queries, chain_keys)[..., None]
        for chain_keys, _ in chain_pairs
    ]
    top = jnp.max(scores, axis=-1, keepdims=True)
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, chain_scores, top))
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1)
    mixed = jnp.einsum("bkgts,bskh->btkgh", weights, values)
    for score, (_, chain_values) in zip(chain_scores, chain_pairs, strict=True):
        weight = jnp.exp(score - top)[..., 0]
        total += weight
        mixed += jnp.einsum("bkgt,btkh->btkgh", weight, chain_values)
    mixed /= jnp.einsum("bkgt->btkg", total)[..., None]
    outputs = linear(mixed.reshape(*mixed.shape[:2], -1), params["out"])
    return outputs + params["out_bias"] if config.out_bias else outputs

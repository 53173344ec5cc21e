"""A head of EAGLE-3 as it drafts, at every place of a text at once: training-time test.

A chain of drafts that begins behind token i+1 calls the head on (feature i, token i+1), and then on
what the head itself said in the feature's place. Step s of all chains is one call here:

    step 0   (f0 t1)  (f1 t2)  (f2 t3) ...     each sees the pairs up to its own
    step 1   (h0 t2)  (h1 t3)  (h2 t4) ...     each sees the real pairs that its chain saw, and
    step 2   (h0 t3)  (h1 t4)  (h2 t5) ...     its own chain's earlier guesses

The tokens are the text's: a chain is only of use as long as its drafts are kept (arXiv 2503.01840,
section 3.2).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jspec.common.typing import Params
from jspec.drafters.heads.eagle_module import EagleConfig, fuse
from jspec.kernels import apply_rope
from jspec.models.layers import FeedForward, RMSNorm, linear
from jspec.models.rope import rope_cos_sin

_MASKED = -1e30


class Places(NamedTuple):
    """Where the tokens of a row stand that holds several texts, one behind another.

    Attributes:
      text: which text each belongs to, [b t]; 0 is padding.
      positions: in its own text, [b t].
    """

    text: Int32[Array, "b t"]
    positions: Int32[Array, "b t"]

    def visible(self) -> Bool[Array, "b t t"]:
        """Returns which tokens each may see: those before it in its text, and itself."""
        t = self.text.shape[1]
        is_same = self.text[:, :, None] == self.text[:, None]
        return is_same & jnp.tril(jnp.ones([t, t], bool))

    def has_ahead(self, by: int) -> Bool[Array, "b t"]:
        """Returns whether the text goes on for so many tokens after each."""
        ahead = jnp.pad(self.text, ((0, 0), (0, by)))[:, by:]
        return (ahead == self.text) & (self.text > 0)


def unroll(
    config: EagleConfig,
    params: Params,
    embedded: Float[Array, "b t d"],
    features: Float[Array, "b t l d"],
    places: Places,
    num_steps: int,
) -> list[Float32[Array, "b t d"]]:
    """Returns what the head says at every place after each of a chain's calls, normed.

    Rows may hold several texts, one behind another.

    Args:
      config: the head's.
      params: the head's.
      embedded: the target's embeddings of a text, [b t d].
      features: the target's features at its tokens, [b t l d].
      places: where its tokens stand.
      num_steps: calls of each chain.

    Returns:
      For each step s, [b t d]: at i what the distribution of token i + 2 + s follows from, through
      `head_logits`. The last 2 + s places of a text have no meaning.
    """
    visible = places.visible()
    hidden = fuse(params, features)
    real, guesses, outputs = None, [], []
    for step in range(num_steps):
        tokens = _shift(embedded.astype(jnp.float32), 1 + step)
        queries, keys, values = _project(config, params, tokens, hidden, places.positions + step)
        if real is None:
            real = keys, values
        else:
            guesses.append((keys, values))
        hidden = hidden + _mix(config, params, queries, real, guesses, visible)
        normed = RMSNorm(config.layer.norm_epsilon).apply(
            {"params": params["head"]["mlp_norm"]}, hidden
        )
        hidden = hidden + FeedForward(config.layer).apply({"params": params["head"]["mlp"]}, normed)  # type: ignore[operator, arg-type]
        final = RMSNorm(config.layer.norm_epsilon)
        outputs.append(final.apply({"params": params["head"]["final_norm"]}, hidden))
    return outputs


def head_logits(params: Params, outputs: Float32[Array, "b t d"]) -> Float32[Array, "b t u"]:
    """Returns the logits of the tokens that a head can propose."""
    return linear(outputs, params["head"]["head"])


_KeysAndValues = tuple[Float32[Array, "b t k h"], Float32[Array, "b t k h"]]


def _shift(rows: Float32[Array, "b t d"], by: int) -> Float32[Array, "b t d"]:
    """Moves a text to the left; zeros come in from the right."""
    return jnp.pad(rows, ((0, 0), (0, by), (0, 0)))[:, by:]


def _project(
    config: EagleConfig,
    params: Params,
    tokens: Float32[Array, "b t d"],
    hidden: Float32[Array, "b t d"],
    positions: Int32[Array, "b t"],
) -> tuple[Float32[Array, "b t k g h"], Float32[Array, "b t k h"], Float32[Array, "b t k h"]]:
    """Returns the queries, scaled, the keys and the values of one step."""
    cfg, head = config.layer, params["head"]
    b, t = tokens.shape[:2]
    k, g, h = cfg.num_kv_heads, cfg.num_groups, cfg.head_dim
    norm = RMSNorm(cfg.norm_epsilon)
    both = [
        norm.apply({"params": head["embedding_norm"]}, tokens),
        norm.apply({"params": head["feature_norm"]}, hidden),
    ]
    qkv = linear(jnp.concatenate(both, axis=-1), head["attention"]["qkv"])  # type: ignore[operator, arg-type]
    if cfg.attention_bias:
        qkv += head["attention"]["qkv_bias"]
    rope = rope_cos_sin(cfg, positions)
    rotated = apply_rope(qkv[:, :, :, : g + 1].reshape(b, t, k * (g + 1), h), *rope)
    rotated = rotated.reshape(b, t, k, g + 1, h)
    return rotated[:, :, :, :g] * h**-0.5, rotated[:, :, :, g], qkv[:, :, :, g + 1]


def _mix(
    config: EagleConfig,
    params: Params,
    queries: Float32[Array, "b t k g h"],
    real: _KeysAndValues,
    guesses: list[_KeysAndValues],
    visible: Bool[Array, "b t t"],
) -> Float32[Array, "b t d"]:
    """Returns the attention to the real pairs up to each place, and to its own chain's guesses.

    The softmax over both is put together from its parts: scores are not copied into one array.
    """
    scores = jnp.einsum("btkgh,bskh->bkgts", queries, real[0])
    scores = jnp.where(visible[:, None, None], scores, _MASKED)
    own = [jnp.einsum("btkgh,btkh->bkgt", queries, keys)[..., None] for keys, _ in guesses]
    top = jnp.max(scores, axis=-1, keepdims=True)
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, own, top))
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1)
    mixed = jnp.einsum("bkgts,bskh->btkgh", weights, real[1])
    for score, (_, values) in zip(own, guesses, strict=True):
        weight = jnp.exp(score - top)[..., 0]
        total += weight
        mixed += jnp.einsum("bkgt,btkh->btkgh", weight, values)
    mixed /= jnp.einsum("bkgt->btkg", total)[..., None]
    attention = params["head"]["attention"]
    outputs = linear(mixed, attention["out"], num_contracted=3)
    if config.layer.attention_bias:
        outputs += attention["out_bias"]
    return outputs

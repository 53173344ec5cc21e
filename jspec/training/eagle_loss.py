"""What a head of EAGLE-3 is trained for: the target's law at every step of every chain."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jspec.models.eagle import EagleConfig
from jspec.training.eagle_unroll import Places, head_logits, unroll
from jspec.typing import Params, Tokens


class TargetStates(NamedTuple):
    """What a frozen target says of a batch of texts.

    Attributes:
      tokens: the texts, one behind another, padded, [b t].
      places: where each stands.
      is_scored: tokens whose prediction counts, [b t]: those of the answers.
      embedded: the target's embeddings of them, [b t d].
      features: its outputs at the head's feature layers, [b t l d].
      logits: of the token after each, among those that the head can propose, [b t u].
    """

    tokens: Tokens
    places: Places
    is_scored: Bool[Array, "b t"]
    embedded: Float[Array, "b t d"]
    features: Float[Array, "b t l d"]
    logits: Float32[Array, "b t u"]


class StepMetrics(NamedTuple):
    """Of each step of a chain, over all places that count.

    Attributes:
      loss: mean cross-entropy to the target's law, in nats, [s].
      acceptance: mean of the sum over tokens of min(target, head), both at temperature 1, [s].
      agreement: how often both find the same token most likely, [s].
      length: tokens a round with a draft at each step would emit at temperature 0, scalar.
    """

    loss: Float32[Array, "s"]
    acceptance: Float32[Array, "s"]
    agreement: Float32[Array, "s"]
    length: Float32[Array, ""]


def eagle_loss(
    params: Params,
    states: TargetStates,
    *,
    config: EagleConfig,
    is_known: Bool[Array, "v"],
    num_steps: int,
    decay: float,
) -> tuple[Float32[Array, ""], StepMetrics]:
    """Returns the loss of a batch, and what it is made of.

    The sum over steps s of decay^s times the cross-entropy to the target's law at temperature 1,
    both among the tokens that the head can propose; places whose token is another are left out.
    (arXiv 2503.01840, section 3.)

    Args:
      params: the head's.
      states: the target's.
      config: the head's.
      is_known: which of the target's tokens the head can propose, [v].
      num_steps: calls of each chain.
      decay: weight of each step relative to the one before.
    """
    outputs = unroll(config, params, states.embedded, states.features, states.places, num_steps)
    t = states.tokens.shape[1]
    can_hit = states.is_scored & is_known[states.tokens]
    losses, overlaps, agreements = [], [], []
    is_alive = jnp.ones([len(states.tokens), t], bool)
    length = jnp.zeros([len(states.tokens), t], jnp.float32)
    for step, output in enumerate(outputs):
        # Place i of this step predicts token i + 2 + step, of which logits i + 1 + step speak.
        logits = jax.nn.log_softmax(head_logits(params, output))
        target = jax.nn.log_softmax(_ahead(states.logits, 1 + step))
        scored = _ahead(states.is_scored, 2 + step) & states.places.has_ahead(2 + step)
        counts = scored & _ahead(can_hit, 2 + step)
        probs = jnp.exp(target)
        losses.append(_mean(-jnp.sum(probs * logits, axis=-1), counts))
        overlaps.append(_mean(jnp.sum(jnp.minimum(probs, jnp.exp(logits)), axis=-1), counts))
        agrees = (jnp.argmax(logits, axis=-1) == jnp.argmax(target, axis=-1)) & counts
        agreements.append(_mean(agrees.astype(jnp.float32), scored))
        is_alive &= agrees
        length += is_alive.astype(jnp.float32)
    weights = jnp.float32(decay) ** jnp.arange(num_steps, dtype=jnp.float32)
    metrics = StepMetrics(
        jnp.stack(losses),
        jnp.stack(overlaps),
        jnp.stack(agreements),
        1 + _mean(length, _ahead(states.is_scored, 2) & states.places.has_ahead(2)),
    )
    return jnp.sum(weights * metrics.loss), metrics


def _ahead(leaf: Array, by: int) -> Array:
    """Moves [b t ...] to the left; zeros come in from the right."""
    padding = [(0, 0), (0, by)] + [(0, 0)] * (leaf.ndim - 2)
    return jnp.pad(leaf, padding)[:, by:]


def _mean(values: Float32[Array, "b t"], counts: Bool[Array, "b t"]) -> Float32[Array, ""]:
    return jnp.sum(jnp.where(counts, values, 0.0)) / jnp.maximum(
        jnp.sum(counts, dtype=jnp.float32), 1.0
    )


def known_tokens(config: EagleConfig, ids: Int32[Array, "u"]) -> Bool[Array, "v"]:
    """Returns which of the target's tokens a head with those ids can propose."""
    return jnp.zeros([config.target_vocab_size], bool).at[ids].set(True)

"""The loss of heads: cross-entropy to the target's distribution at every step of every chain.

A chain begins after each position i of a text. The target itself predicts token i + 1; step s of
the chain predicts token i + 2 + s, and should give the target's distribution of that token, which
follows token i + 1 + s of the text. All chains of a batch are scored at once (teacher forcing).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, Shaped

from jspec.training.packing import Rows, shift_left
from jspec.training.target_states import TargetStates

# The metric by which checkpoints are compared: tokens a target call emits at temperature 0.
SCORE = "tokens_per_call"


class TargetStep(NamedTuple):
    """The target's side of one step of every chain.

    Attributes:
      probs: the target's distribution among the tokens that the drafter can propose, [b n u].
      best: the most likely of those, [b n]; in greedy texts, where `can_hit`, of all tokens.
      is_scored: chains that reach so far, with an answer's token there, [b n].
      can_hit: those of them whose token the drafter can propose, [b n].
    """

    probs: Float32[Array, "b n u"]
    best: Int32[Array, "b n"]
    is_scored: Bool[Array, "b n"]
    can_hit: Bool[Array, "b n"]


def chain_loss(
    draft_logits: Callable[[int], Float32[Array, "b n u"]],
    target_step: Callable[[int], TargetStep],
    *,
    num_steps: int,
    decay: float,
    is_frugal: bool = False,
) -> tuple[Float32[Array, ""], dict[str, Array]]:
    """Returns the loss of a batch, and metrics.

    The loss is the sum over steps s of decay^s times the cross-entropy to the target's distribution
    at temperature 1, both among the tokens that the drafter can propose; positions whose token is
    another are left out.

    Args:
      draft_logits: step -> the drafter's logits.
      target_step: step -> the target's side of it.
      num_steps: steps of a chain, s.
      decay: weight of each step relative to the one before.
      is_frugal: recompute a step's logits for the gradient, so that one step's are held at a time.

    Returns:
      The loss and, of each step, [s],
      `losses`: mean cross-entropy, in nats.
      `acceptance`: mean of sum min(target, drafter) at temperature 1, again among the tokens that
        it can propose: a drafter of few tokens is accepted less often than this.
      `agreement`: how often both find the same token most likely.
      `SCORE`: tokens a round with a draft at each step would emit at temperature 0, scalar.
    """

    def score(step: int) -> tuple[Array, Array, Array]:
        logits, target = draft_logits(step), target_step(step)
        # As few arrays of the logits' size as the gradient allows; no argmax of them: it is slow.
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        loss = masked_mean(total[..., 0] - jnp.sum(target.probs * logits, axis=-1), target.can_hit)
        shared = jnp.minimum(target.probs, jnp.exp(logits - total))
        overlap = masked_mean(jnp.sum(shared, axis=-1), target.can_hit)
        at_best = jnp.take_along_axis(logits, target.best[..., None], axis=-1)[..., 0]
        return loss, overlap, (at_best >= jnp.max(logits, axis=-1)) & target.can_hit

    if is_frugal:
        score = jax.checkpoint(score, static_argnums=0)
    steps, length = [], jnp.float32(1)
    begun = is_alive = target_step(0).is_scored
    for step in range(num_steps):
        loss, overlap, agrees = score(step)
        is_alive &= agrees  # a draft counts only if all before it were accepted
        length += masked_mean(is_alive, begun)
        agreement = masked_mean(agrees, target_step(step).is_scored)
        steps.append({"losses": loss, "acceptance": overlap, "agreement": agreement})
    metrics = jax.tree.map(lambda *values: jnp.stack(values), *steps)
    weights = jnp.float32(decay) ** jnp.arange(num_steps, dtype=jnp.float32)
    return jnp.sum(weights * metrics["losses"]), metrics | {SCORE: length}


def target_steps(
    rows: Rows, states: TargetStates, ids: Int32[np.ndarray, "u"]
) -> Callable[[int], TargetStep]:
    """Returns the target's side of chains after every position; drafts are among `ids`, [u]."""
    is_known = jnp.isin(jnp.asarray(rows.tokens), jnp.asarray(ids), method="binary_search")
    probs, best = jax.nn.softmax(states.logits), jnp.argmax(states.logits, axis=-1)

    def target_step(step: int) -> TargetStep:
        ahead = 2 + step
        is_scored = rows.is_scored(ahead)
        here = shift_left(probs, ahead - 1), shift_left(best, ahead - 1)
        return TargetStep(*here, is_scored, is_scored & shift_left(is_known, ahead))

    return target_step


def steps_after(
    rows: Rows,
    logits: Float32[Array, "b t u"],
    anchors: Int32[Array, "b n"],
    ids: Int32[np.ndarray, "u"],
    first: int,
) -> Callable[[int], TargetStep]:
    """Returns the target's side of blocks whose step s is the token `first` + s after the anchor.

    `logits` are the target's among `ids`, [u], which are those that can be drafted.
    """
    is_known = jnp.isin(jnp.asarray(rows.tokens), jnp.asarray(ids), method="binary_search")

    def at(leaf: Array, ahead: int) -> Array:
        place = (anchors + ahead).reshape(*anchors.shape, *[1] * (leaf.ndim - 2))
        return jnp.take_along_axis(leaf, place, axis=1, mode="clip")

    def target_step(step: int) -> TargetStep:
        ahead = first + step
        here, is_scored = at(logits, ahead - 1), at(rows.is_scored(ahead), 0)
        can_hit = is_scored & at(is_known, ahead)
        return TargetStep(jax.nn.softmax(here), jnp.argmax(here, axis=-1), is_scored, can_hit)

    return target_step


def masked_mean(values: Shaped[Array, "b n"], mask: Bool[Array, "b n"]) -> Float32[Array, ""]:
    """Returns the mean over the positions of a mask; 0 if it is empty."""
    total = jnp.sum(jnp.where(mask, values.astype(jnp.float32), 0.0))
    return total / jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)

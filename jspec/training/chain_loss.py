"""What drafters of chains are trained for: the target's distribution at every step of every chain.

Step s of the chain that begins behind place i of a text predicts token i + 2 + s: the target's own
next token is i + 1, and its distribution of what follows token i + 1 + s, in the text, is what step
s should say. All chains of a batch are scored at once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jspec.training.target_states import TargetStates
from jspec.training.texts import Rows
from jspec.training.trainee import SCORE


class Seen(NamedTuple):
    """One step of every chain, as the target sees it.

    Attributes:
      probs: the target's distribution among the tokens that the drafter can propose, [b n u].
      best: the most likely of those, [b n]; where a place can be hit, and texts are greedy, it is
        the most likely of all.
      is_scored: chains that go so far, whose token there belongs to an answer, [b n].
      can_hit: those of them whose token the drafter can propose, [b n].
    """

    probs: Float32[Array, "b n u"]
    best: Int32[Array, "b n"]
    is_scored: Bool[Array, "b n"]
    can_hit: Bool[Array, "b n"]


class StepMetrics(NamedTuple):
    """Of each step of a chain, over all places that count.

    Attributes:
      loss: mean cross-entropy to the target's distribution, in nats, [s].
      acceptance: mean of the sum over tokens of min(target, drafter), both at temperature 1, [s].
        The target's distribution is taken among the tokens that the drafter can propose, at places
        whose token is one of them: a drafter of few tokens is kept less often than this.
      agreement: how often both find the same token most likely, [s].
      length: tokens a round with a draft at each step would emit at temperature 0, scalar.
    """

    loss: Float32[Array, "s"]
    acceptance: Float32[Array, "s"]
    agreement: Float32[Array, "s"]
    length: Float32[Array, ""]


def chain_loss(
    say: Callable[[int], Float32[Array, "b n u"]],
    see: Callable[[int], Seen],
    *,
    num_steps: int,
    decay: float,
    is_frugal: bool = False,
) -> tuple[Float32[Array, ""], StepMetrics]:
    """Returns the loss of a batch, and what it is made of.

    The sum over steps s of decay^s times the cross-entropy to the target's distribution at
    temperature 1, both among the tokens that the drafter can propose; places whose token is another
    are left out.

    Args:
      say: step -> the drafter's logits.
      see: step -> the target's side of it.
      num_steps: of a chain.
      decay: weight of each step relative to the one before.
      is_frugal: make a step's logits again for the gradient, so that only one step's are in memory.
    """

    def score(step: int) -> tuple[Array, Array, Array]:
        return _score(say(step), see(step))

    if is_frugal:
        score = jax.checkpoint(score, static_argnums=0)
    scores, length = [], jnp.float32(1)
    begun = is_alive = see(0).is_scored
    for step in range(num_steps):
        loss, overlap, agrees = score(step)
        is_alive &= agrees
        length += mean_where(is_alive.astype(jnp.float32), begun)
        agreement = mean_where(agrees.astype(jnp.float32), see(step).is_scored)
        scores.append((loss, overlap, agreement))
    losses, overlaps, agreements = (jnp.stack(values) for values in zip(*scores, strict=True))
    weights = jnp.float32(decay) ** jnp.arange(num_steps, dtype=jnp.float32)
    return jnp.sum(weights * losses), StepMetrics(losses, overlaps, agreements, length)


def _score(
    logits: Float32[Array, "b n u"], seen: Seen
) -> tuple[Float32[Array, ""], Float32[Array, ""], Bool[Array, "b n"]]:
    """Returns a step's cross-entropy, its overlap, and where both find the same token best.

    No array as large as the logits is made but those that the gradient needs; an argmax is slow.
    """
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    loss = mean_where(total[..., 0] - jnp.sum(seen.probs * logits, axis=-1), seen.can_hit)
    shared = jnp.minimum(seen.probs, jnp.exp(logits - total))
    overlap = mean_where(jnp.sum(shared, axis=-1), seen.can_hit)
    at_best = jnp.take_along_axis(logits, seen.best[..., None], axis=-1)[..., 0]
    return loss, overlap, (at_best >= jnp.max(logits, axis=-1)) & seen.can_hit


def see_everywhere(
    states: TargetStates, is_known: Bool[Array, "v"] | None = None
) -> Callable[[int], Seen]:
    """Returns the target's side of chains that begin behind every place of its texts.

    Args:
      states: the target's.
      is_known: which of its tokens the drafter can propose, [v]; None for all.
    """
    can_hit = states.is_scored
    if is_known is not None:
        can_hit &= is_known[states.tokens]
    probs, best = jax.nn.softmax(states.logits), jnp.argmax(states.logits, axis=-1)

    def see(step: int) -> Seen:
        by = 2 + step
        is_scored = ahead(states.is_scored, by) & states.places.has_ahead(by)
        distribution = ahead(probs, by - 1), ahead(best, by - 1)
        return Seen(*distribution, is_scored, is_scored & ahead(can_hit, by))

    return see


def ahead(leaf: Array, by: int) -> Array:
    """Moves [b t ...] to the left; zeros come in from the right."""
    padding = [(0, 0), (0, by)] + [(0, 0)] * (leaf.ndim - 2)
    return jnp.pad(leaf, padding)[:, by:]


def mean_where(values: Float32[Array, "b n"], counts: Bool[Array, "b n"]) -> Float32[Array, ""]:
    """Returns the mean over the places that count; 0 where none does."""
    return jnp.sum(jnp.where(counts, values, 0.0)) / jnp.maximum(
        jnp.sum(counts, dtype=jnp.float32), 1.0
    )


def report(metrics: StepMetrics) -> dict[str, Array]:
    """Returns metrics as a trainee's `loss` does."""
    return {
        "losses": metrics.loss,
        "acceptance": metrics.acceptance,
        "agreement": metrics.agreement,
        SCORE: metrics.length,
    }


def weigh(metrics: dict[str, Any], rows: Rows) -> tuple[dict[str, Any], Float32[Array, ""]]:
    """Returns metrics as a trainee's `evaluate` does: times the tokens of answers, and those."""
    count = jnp.sum(jnp.asarray(rows.is_answer)).astype(jnp.float32)
    return {name: value * count for name, value in metrics.items()}, count

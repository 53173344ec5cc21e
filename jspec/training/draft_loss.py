"""A draft model beside its target, at every place of a text: losses, and how far chains would get.

The distributions of a large vocabulary are long: they are made for a few places at a time and
forgotten, in the backward pass once more.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from jspec.common.typing import Tokens
from jspec.models.layers import Kernel, linear
from jspec.training.losses import LOSSES, overlap

_CHUNK = 64  # places of a row at a time


class Sight(NamedTuple):
    """What a model sees at each place, and what turns it into logits.

    Attributes:
      hidden: its normed outputs, [b t d].
      head: [v d].
    """

    hidden: Float32[Array, "b t d"]
    head: Kernel


class PlaceMetrics(NamedTuple):
    """At each place i, of the distribution of token i + 1.

    Attributes:
      loss: what is trained for, [b t].
      acceptance: sum min(target, draft), both at temperature 1, [b t].
      agreement: 1 where both find the same token most likely, else 0, [b t].
    """

    loss: Float32[Array, "b t"]
    acceptance: Float32[Array, "b t"]
    agreement: Float32[Array, "b t"]


def compare(
    draft: Sight, target: Sight, tokens: Tokens, weights: Mapping[str, float], vocab_size: int
) -> PlaceMetrics:
    """Returns what a draft and its target say of the same texts.

    Args:
      draft: what the draft sees, [b t ...].
      target: what the target sees there; no gradient goes to it.
      tokens: what came next at each place, [b t].
      weights: of the losses, by their names in `LOSSES`.
      vocab_size: ids that there are; the rows behind them are padding.
    """
    target = jax.lax.stop_gradient(target)

    def at(places: tuple[Array, Array, Array]) -> PlaceMetrics:
        of_draft, of_target, next_tokens = places
        draft_logits = linear(of_draft, draft.head)[..., :vocab_size]
        target_logits = linear(of_target, target.head)[..., :vocab_size]
        agrees = jnp.argmax(draft_logits, axis=-1) == jnp.argmax(target_logits, axis=-1)
        loss = jnp.float32(0)
        for name, weight in weights.items():
            loss += weight * LOSSES[name](draft_logits, target_logits, next_tokens)
        return PlaceMetrics(loss, overlap(draft_logits, target_logits), agrees.astype(jnp.float32))

    chunks = jax.tree.map(_to_chunks, (draft.hidden, target.hidden, tokens))
    found = jax.lax.map(jax.checkpoint(at), chunks)
    return jax.tree.map(lambda leaf: _from_chunks(leaf, tokens.shape[1]), found)


def _to_chunks(leaf: Array) -> Array:
    """[b t ...] to [chunks b t' ...], zeros behind the end."""
    b, t = leaf.shape[:2]
    num_chunks = -(-t // _CHUNK)
    padding = [(0, 0), (0, num_chunks * _CHUNK - t)] + [(0, 0)] * (leaf.ndim - 2)
    split = jnp.pad(leaf, padding).reshape(b, num_chunks, _CHUNK, *leaf.shape[2:])
    return jnp.moveaxis(split, 1, 0)


def _from_chunks(leaf: Float[Array, "c b t"], length: int) -> Float[Array, "b t"]:
    return jnp.moveaxis(leaf, 0, 1).reshape(leaf.shape[1], -1)[:, :length]


def chain_metrics(
    found: PlaceMetrics, is_scored: Bool[Array, "b t"], num_steps: int
) -> dict[str, Any]:
    """Returns what rounds that begin at every scored place would come to.

    Chains run along the text: the s-th draft of the one that begins at place i is the draft at
    place i + s, and the chain's length counts the drafts that are kept one after another.

    Args:
      found: place by place.
      is_scored: places whose next token counts, [b t].
      num_steps: drafts of a chain, s.

    Returns:
      `losses`, `acceptance`, `agreement`: of each step, [s], in the first one's unit.
      `tokens_per_call`: tokens a round would emit at temperature 0.
      `sampled_tokens_per_call`: the same at temperature 1, along the text.
    """
    counts = [is_scored]  # a chain ends with its text, as the last place of a text never counts
    for step in range(1, num_steps):
        counts.append(counts[-1] & _ahead(is_scored, step))

    def by_step(values: Float32[Array, "b t"]) -> Float32[Array, "s"]:
        means = [masked_mean(_ahead(values, s), counted) for s, counted in enumerate(counts)]
        return jnp.stack(means)

    def length(kept: Float32[Array, "b t"]) -> Float32[Array, ""]:
        product, total = jnp.ones_like(kept), jnp.zeros_like(kept)
        for step, counted in enumerate(counts):
            product *= jnp.where(counted, _ahead(kept, step), 0.0)
            total += product
        return 1 + masked_mean(total, is_scored)

    return {
        "losses": by_step(found.loss),
        "acceptance": by_step(found.acceptance),
        "agreement": by_step(found.agreement),
        "tokens_per_call": length(found.agreement),
        "sampled_tokens_per_call": length(found.acceptance),
    }


def masked_mean(
    values: Float32[Array, "b t"], is_counted: Bool[Array, "b t"]
) -> Float32[Array, ""]:
    """Returns the mean over the places that count; 0 without any."""
    total = jnp.sum(jnp.where(is_counted, values, 0.0))
    return total / jnp.maximum(jnp.sum(is_counted, dtype=jnp.float32), 1.0)


def _ahead(leaf: Array, by: int) -> Array:
    """Moves [b t] to the left; zeros come in from the right."""
    return jnp.pad(leaf, ((0, 0), (0, by)))[:, by:]

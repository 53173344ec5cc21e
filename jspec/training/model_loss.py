"""The losses of draft models, which are compared with the target at every position of a text.

With p the target's distribution, q the draft's and x the text's next token:

    cross_entropy     -log q(x)                 on texts that the target wrote
    kl                sum p log(p / q)          distillation of the whole distribution
    total_variation   1 - sum min(p, q)         one minus the probability that a draft is accepted
                                                (arXiv 2211.17192, section 3.3 and section 6)

Logits of a large vocabulary take much memory: they are made for a few positions at a time and
recomputed in the backward pass.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Shaped
from optax.losses import kl_divergence_with_log_targets, softmax_cross_entropy_with_integer_labels

from jspec.common.typing import Logits, Params, Tokens
from jspec.models import DecoderConfig
from jspec.models.layers import Kernel, finish_logits, head_kernel, linear
from jspec.training.chain_loss import SCORE, masked_mean
from jspec.training.packing import Rows, packed_hidden, shift_left

# Of drafts trained in sequence: the share of positions where one of them agrees with the target.
COVERED_BEFORE, COVERED = "covered_before", "covered"
LOSSES = ("cross_entropy", "kl", "total_variation")
_CHUNK = 64  # positions of a row at a time


class LazyLogits(NamedTuple):
    """Logits before they are computed: normed last hidden states, the head [v d], whose it is."""

    hidden: Float32[Array, "b t d"]
    head: Kernel
    config: DecoderConfig

    def of(self, hidden: Float32[Array, "b t d"]) -> Logits:
        """Returns the logits at some hidden states."""
        return finish_logits(self.config, linear(hidden, self.head))


class PositionMetrics(NamedTuple):
    """A draft compared with its target at each position i, in the distribution of token i + 1.

    Attributes:
      loss: what is trained for, [b t].
      acceptance: see `overlap`, [b t].
      agreement: whether both find the same token most likely, [b t].
    """

    loss: Float32[Array, "b t"]
    acceptance: Float32[Array, "b t"]
    agreement: Bool[Array, "b t"]


def position_losses(
    draft_logits: Logits, target_logits: Logits, tokens: Tokens
) -> dict[str, Float32[Array, "b t"]]:
    """Returns the losses by name, [b t], of logits [b t v] and the next tokens [b t].

    The first two are in nats. The last one's gradient vanishes where the two distributions share
    nothing: begin with another loss.
    """
    draft, target = jax.nn.log_softmax(draft_logits), jax.nn.log_softmax(target_logits)
    return {
        "cross_entropy": softmax_cross_entropy_with_integer_labels(draft_logits, tokens),
        "kl": kl_divergence_with_log_targets(draft, target),
        "total_variation": 1 - overlap(draft_logits, target_logits),
    }


def overlap(draft_logits: Logits, target_logits: Logits) -> Float32[Array, "b t"]:
    """Returns sum min(p, q), the probability that a draft is accepted at temperature 1, [b t]."""
    draft, target = jax.nn.softmax(draft_logits), jax.nn.softmax(target_logits)
    return jnp.sum(jnp.minimum(draft, target), axis=-1)


def lazy_logits(
    config: DecoderConfig, params: Params, rows: Rows, dtype: jax.typing.DTypeLike
) -> LazyLogits:
    """Returns a model's logits at every token; see `packed_hidden`."""
    hidden = packed_hidden(config, params, rows, dtype)
    return LazyLogits(hidden, head_kernel(config, params), config)


def compare(
    draft: LazyLogits,
    target: LazyLogits,
    tokens: Tokens,
    weights: Mapping[str, float],
    vocab_size: int,
) -> PositionMetrics:
    """Returns how a draft and its target, which gets no gradient, compare on texts [b t].

    `weights` are those of the losses by name; others do not count. There are `vocab_size` token
    ids; the heads' later rows are padding.
    """
    fixed = jax.lax.stop_gradient((target.hidden, target.head))
    target = LazyLogits(*fixed, target.config)

    def compare_chunk(chunk: tuple[Array, Array, Array]) -> PositionMetrics:
        draft_hidden, target_hidden, next_tokens = chunk
        draft_logits = draft.of(draft_hidden)[..., :vocab_size]
        target_logits = target.of(target_hidden)[..., :vocab_size]
        agrees = jnp.argmax(draft_logits, axis=-1) == jnp.argmax(target_logits, axis=-1)
        losses = position_losses(draft_logits, target_logits, next_tokens)
        loss = sum((weight * losses[name] for name, weight in weights.items()), jnp.float32(0))
        return PositionMetrics(loss, overlap(draft_logits, target_logits), agrees)

    def to_chunks(leaf: Array) -> Array:  # [b t ...] to [chunks b t' ...], zeros after the end
        padding = [(0, 0), (0, -length % _CHUNK)] + [(0, 0)] * (leaf.ndim - 2)
        split = jnp.pad(leaf, padding).reshape(leaf.shape[0], -1, _CHUNK, *leaf.shape[2:])
        return jnp.moveaxis(split, 1, 0)

    length = tokens.shape[1]
    leaves = draft.hidden, target.hidden, shift_left(tokens, 1)
    chunks = jax.lax.map(jax.checkpoint(compare_chunk), jax.tree.map(to_chunks, leaves))
    return jax.tree.map(
        lambda leaf: jnp.moveaxis(leaf, 0, 1).reshape(leaf.shape[1], -1)[:, :length], chunks
    )


def chain_metrics(
    comparison: PositionMetrics, is_scored: Bool[Array, "b t"], num_steps: int
) -> dict[str, Array]:
    """Returns what rounds of `num_steps` drafts that begin at every scored position would achieve.

    Chains run along the text: draft s of the chain that begins at position i is the draft at
    position i + s, and the chain's length counts the drafts accepted before the first rejection.

    Returns:
      `losses`, `acceptance`, `agreement`: means at each step, [s].
      `tokens_per_call`: tokens a round would emit at temperature 0.
      `sampled_tokens_per_call`: the same at temperature 1, along the text.
    """
    counts = [is_scored]  # a chain ends with its text: the last position of a text never counts
    for step in range(1, num_steps):
        counts.append(counts[-1] & shift_left(is_scored, step))

    def by_step(values: Shaped[Array, "b t"]) -> Float32[Array, "s"]:
        return jnp.stack([masked_mean(shift_left(values, s), on) for s, on in enumerate(counts)])

    def length(accepted: Shaped[Array, "b t"]) -> Float32[Array, ""]:
        product, total = jnp.ones(accepted.shape), jnp.zeros(accepted.shape)
        for step, counted in enumerate(counts):
            product *= jnp.where(counted, shift_left(accepted, step), 0).astype(jnp.float32)
            total += product
        return 1 + masked_mean(total, is_scored)

    return {
        "losses": by_step(comparison.loss),
        "acceptance": by_step(comparison.acceptance),
        "agreement": by_step(comparison.agreement),
        SCORE: length(comparison.agreement),
        "sampled_tokens_per_call": length(comparison.acceptance),
    }


def boosted_loss(
    comparison: PositionMetrics,
    is_scored: Bool[Array, "b t"],
    is_known: Bool[Array, "b t"],
    *,
    known_weight: float,
    num_steps: int,
) -> tuple[Float32[Array, ""], dict[str, Array]]:
    """Returns the loss of a draft beside earlier ones, and metrics of all of them together.

    SpecInfer (arXiv 2305.09781, section 3, collective boost-tuning) trains one small model after
    another, the next one on prompts that those before do not continue as the target does. Here
    every position of a text is such a prompt, and its continuation is one token.

    `is_known` marks where an earlier draft and the target find the same next token most likely. The
    loss is a mean over the scored positions, these weighted by `known_weight`, the others by 1.

    Of the metrics, `COVERED_BEFORE` is the share of positions where an earlier draft agrees with
    the target, `COVERED` where any draft does, and `SCORE` the tokens of a round at temperature 0
    whose tree has, at every node, the best token of each draft; `own_tokens_per_call` is that of a
    chain of this draft alone.
    """
    weights = jnp.where(is_scored, jnp.where(is_known, jnp.float32(known_weight), 1.0), 0.0)
    loss = jnp.sum(weights * comparison.loss) / jnp.maximum(jnp.sum(weights), 1e-6)
    either = comparison.agreement | is_known
    alone = chain_metrics(comparison, is_scored, num_steps)
    together = chain_metrics(comparison._replace(agreement=either), is_scored, num_steps)
    return loss, alone | {
        "own_tokens_per_call": alone[SCORE],
        COVERED_BEFORE: masked_mean(is_known, is_scored),
        COVERED: masked_mean(either, is_scored),
        SCORE: together[SCORE],
    }

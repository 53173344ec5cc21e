"""Drafts trained in sequence, each on what the earlier ones miss: SpecInfer's boost-tuning.

SpecInfer (arXiv 2305.09781, section 3, collective boost-tuning) trains one small model after
another: prompts whose continuation it already says as the target does are marked, and the next one
is trained on the others. Here every place of a text is such a prompt, all that stands before it,
and its continuation is one token. A place is marked where an earlier draft and the target find the
same next token most likely: at temperature 0 that draft would be kept. Only the text's own tokens
stand before it, so that this is what a tree would find along the target's answer.

Marks are made once, before the first update: the target and the earlier drafts stay as they are.
"""

import sys
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32

from jspec.common.typing import Params
from jspec.models.outputs import head_kernel
from jspec.training.draft_loss import PlaceMetrics, Sight, chain_metrics, compare, masked_mean
from jspec.training.packed import packed_hidden
from jspec.training.texts import Rows, Text, iterate_rows, pack, spans
from jspec.training.trainee import COVERED, COVERED_BEFORE, SCORE
from jspec.weights.resolver import LoadedModel
from jspec.weights.vocabulary import shared_vocab_size


def make_marks(
    target: LoadedModel,
    earlier: Sequence[LoadedModel],
    texts: Sequence[Text],
    *,
    seq_len: int,
    batch_size: int,
) -> Callable[[Rows], Rows]:
    """Returns what adds `is_known` to rows of the texts.

    Args:
      target: the model.
      earlier: drafts that are trained already, at least one.
      texts: all that will be asked for.
      seq_len: tokens of a row at most; what is longer is cut.
      batch_size: rows computed at a time.

    Raises:
      InputError: a draft of another vocabulary.
    """
    read = _make_reader(target, earlier)
    params = [draft.params for draft in earlier]
    found: dict[bytes, np.ndarray] = {}
    longest_first = sorted((text.ids[:seq_len] for text in texts), key=len, reverse=True)
    rows = pack([Text((), ids) for ids in longest_first], seq_len)
    for batch in iterate_rows(rows, batch_size):
        is_known = np.asarray(read(target.params, params, batch))
        found |= {key: is_known[row, place] for row, place, key in spans(batch)}
    share = np.concatenate([one[:-1] for one in found.values()]).mean()
    print(f"earlier drafts say the target's next token at {share:.1%} of the texts' places",
          file=sys.stderr, flush=True)  # fmt: skip

    def fill(rows: Rows) -> Rows:
        is_known = np.zeros(rows.tokens.shape, bool)
        for row, place, key in spans(rows):
            is_known[row, place] = found[key]
        return rows._replace(is_known=is_known)

    return fill


def _make_reader(
    target: LoadedModel, earlier: Sequence[LoadedModel]
) -> Callable[[Params, Sequence[Params], Rows], Bool[Array, "b t"]]:
    """Returns (target's parameters, those of the drafts, rows) -> where a draft agrees."""
    sizes = [shared_vocab_size(target, draft) for draft in earlier]

    def see(model: LoadedModel, params: Params, rows: Rows) -> Sight:
        hidden = packed_hidden(model.config, params, rows, params["embedding"].dtype)
        return Sight(hidden, head_kernel(model.config, params))

    @jax.jit
    def read(target_params: Params, params: Sequence[Params], rows: Rows) -> Bool[Array, "b t"]:
        tokens = jnp.asarray(rows.tokens)  # which came next does not matter to the distributions
        of_target, is_known = see(target, target_params, rows), jnp.zeros(tokens.shape, bool)
        for draft, own, size in zip(earlier, params, sizes, strict=True):
            found = compare(see(draft, own, rows), of_target, tokens, {"kl": 1.0}, size)
            is_known |= found.agreement > 0
        return is_known

    return read


def boosted(
    found: PlaceMetrics,
    is_scored: Bool[Array, "b t"],
    is_known: Bool[Array, "b t"],
    *,
    known_weight: float,
    num_steps: int,
) -> tuple[Float32[Array, ""], dict[str, Array]]:
    """Returns the loss of a draft beside earlier ones, and what all of them come to.

    The loss is the mean over scored places, those that are marked counting `known_weight` times as
    much as others; 0 where none is left.

    Args:
      found: of the draft that is trained, place by place.
      is_scored: places whose next token counts.
      is_known: those that are marked.
      known_weight: 0 leaves marked places out.
      num_steps: drafts of a chain.

    Returns:
      The loss, and metrics: the share of places where an earlier draft agrees with the target
      (`COVERED_BEFORE`), where any of them does, this one included (`COVERED`), and `SCORE`: tokens
      that a round would emit at temperature 0 if its tree had, at every node, the best token of
      each draft. `own_tokens_per_call` is that of a chain of this draft alone.
    """
    weights = jnp.where(is_scored, jnp.where(is_known, jnp.float32(known_weight), 1.0), 0.0)
    loss = jnp.sum(weights * found.loss) / jnp.maximum(jnp.sum(weights), 1e-6)
    known = is_known.astype(jnp.float32)
    either = jnp.maximum(found.agreement, known)
    alone = chain_metrics(found, is_scored, num_steps)
    together = chain_metrics(found._replace(agreement=either), is_scored, num_steps)
    return loss, alone | {
        "own_tokens_per_call": alone[SCORE],
        COVERED_BEFORE: masked_mean(known, is_scored),
        COVERED: masked_mean(either, is_scored),
        SCORE: together[SCORE],
    }

"""Drafts trained in sequence, each on what the earlier ones miss: SpecInfer's boost-tuning.

SpecInfer (arXiv 2305.09781, section 3, collective boost-tuning) trains one small model after
another: prompts that one continues as the target does are marked, and the next model is trained on
the others. Here every position of a text is such a prompt, and its continuation is one token. A
position is marked where an earlier draft and the target find the same next token most likely: at
temperature 0 that draft would be accepted. Positions are marked once, before the first update.
"""

import sys
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32

from jspec.common.typing import Params
from jspec.training.chain_loss import masked_mean
from jspec.training.model_loss import PositionMetrics, chain_metrics, compare, lazy_logits
from jspec.training.packing import Rows, compute_by_text, take_by_text
from jspec.training.texts import Text
from jspec.training.trainee import COVERED, COVERED_BEFORE, SCORE
from jspec.weights.resolver import LoadedModel
from jspec.weights.vocabulary import shared_vocab_size


def mark_known(
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
      texts: all texts of the rows to fill.
      seq_len: tokens of a row; longer texts are cut.
      batch_size: rows computed at a time.

    Raises:
      InputError: a draft of another vocabulary.
    """
    sizes = [shared_vocab_size(target, draft) for draft in earlier]
    drafts_params = [draft.params for draft in earlier]

    @jax.jit
    def agreement(
        target_params: Params, drafts_params: Sequence[Params], rows: Rows
    ) -> Bool[Array, "b t"]:
        dtype = target_params["embedding"].dtype
        of_target = lazy_logits(target.config, target_params, rows, dtype)
        tokens = jnp.asarray(rows.tokens)
        is_known = jnp.zeros(tokens.shape, bool)
        for draft, params, size in zip(earlier, drafts_params, sizes, strict=True):
            of_draft = lazy_logits(draft.config, params, rows, params["embedding"].dtype)
            is_known |= compare(of_draft, of_target, tokens, {"kl": 1.0}, size).agreement > 0
        return is_known

    found = compute_by_text(
        lambda rows: agreement(target.params, drafts_params, rows),
        [text.ids[:seq_len] for text in texts],
        seq_len=seq_len,
        batch_size=batch_size,
    )
    share = np.concatenate([one[:-1] for one in found.values()]).mean()
    print(f"earlier drafts agree with the target at {share:.1%} of the texts' positions",
          file=sys.stderr, flush=True)  # fmt: skip

    def fill(rows: Rows) -> Rows:
        return rows._replace(is_known=take_by_text(found, rows, np.zeros(rows.tokens.shape, bool)))

    return fill


def boosted_loss(
    found: PositionMetrics,
    is_scored: Bool[Array, "b t"],
    is_known: Bool[Array, "b t"],
    *,
    known_weight: float,
    num_steps: int,
) -> tuple[Float32[Array, ""], dict[str, Array]]:
    """Returns the loss of a draft beside earlier ones, and metrics of all of them together.

    The loss is the weighted mean over scored positions; 0 where all weights are 0.

    Args:
      found: of the draft that is trained, by position.
      is_scored: positions whose next token counts.
      is_known: those that are marked.
      known_weight: of marked positions; others have weight 1.
      num_steps: drafts of a chain.

    Returns:
      The loss, and metrics: the share of positions where an earlier draft agrees with the target
      (`COVERED_BEFORE`), where any draft does, this one included (`COVERED`), and `SCORE`: tokens
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

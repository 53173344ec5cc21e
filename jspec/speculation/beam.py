"""Beam search: the k most likely texts so far, each step continued by their best k continuations.

    beams, scores      candidates: every beam's best tokens          next beams
    A  -1.0       ──►  A x -1.2   B x -1.5   A y -1.9   B </s> -2.0  ──►  A x   B x
    B  -1.4                                         a candidate that ends goes to the pool

A score is the sum of a text's log-probabilities; the pool ranks those that have ended by their
score / length ^ length_penalty. The rules are those of transformers' `generate(num_beams=k)`. A
text is not carried along: each step notes which beam every new one continues and by which token.
"""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.typing import Logits, RowTokens
from jspec.sampling.settings import SamplingSettings, process_drafts

EARLY_STOPPING = (False, True, "never")  # by the number that a program is given


class BeamLimits(NamedTuple):
    """What ends beams and their search; all are data, so that another value compiles nothing.

    Attributes:
      stop_ids: tokens that end a beam, padded with -1, [e].
      max_tokens: tokens at which every beam ends, the prompt not counted.
      length_penalty: exponent of the length by which the score of an ended beam is divided.
      early_stopping: place in `EARLY_STOPPING`: to end the search when the best running beam, at
        its present length, could not enter the pool; when the pool is full; or when no longer text
        could enter it.
    """

    stop_ids: Int32[Array, "e"]
    max_tokens: Int32[Array, ""]
    length_penalty: Float32[Array, ""]
    early_stopping: Int32[Array, ""]


class Pool(NamedTuple):
    """The best beams that have ended, best first.

    Attributes:
      scores: with the length penalty, [k]; -inf where there is none yet.
      length: tokens of each, its last included, [k].
      parent: the running beam that each continued by its last token, [k].
      token: that token, [k].
    """

    scores: Float32[Array, "k"]
    length: Int32[Array, "k"]
    parent: Int32[Array, "k"]
    token: Int32[Array, "k"]


class Beams(struct.PyTreeNode):
    """The beams of one request.

    Attributes:
      scores: sum of each running beam's log-probabilities, [k], best first; -inf for one that does
        not exist, as before the first step all but one.
      num_steps: steps taken, which is the number of tokens of each running beam.
      parents: for each step the beam that every new one continues, [s k].
      tokens: and by which token, [s k].
      pool: of those that have ended.
      is_done: whether the search is over.
      has_failed: whether a step found no score that is a number.
    """

    scores: Float32[Array, "k"]
    num_steps: Int32[Array, ""]
    parents: Int32[Array, "s k"]
    tokens: Int32[Array, "s k"]
    pool: Pool
    is_done: Bool[Array, ""]
    has_failed: Bool[Array, ""]

    @classmethod
    def init(cls, num_beams: int, max_steps: int) -> Self:
        """Returns one beam without tokens, and room for as many steps."""
        none = jnp.full([num_beams], -jnp.inf, jnp.float32)
        zeros = jnp.zeros([num_beams], jnp.int32)
        steps = jnp.zeros([max_steps, num_beams], jnp.int32)
        no = jnp.array(False)
        pool = Pool(none, zeros, zeros, zeros)
        return cls(none.at[0].set(0.0), jnp.int32(0), steps, steps, pool, no, no)


class Candidates(NamedTuple):
    """The best next tokens at each place of a block.

    Attributes:
      logprobs: their log-probabilities, best first, [k t c]; NaN where the model gave none.
      tokens: [k t c].
    """

    logprobs: Float32[Array, "*k c"]
    tokens: Int32[Array, "*k c"]


def num_candidates(num_beams: int, num_stop_ids: int) -> int:
    """Returns how many candidates of each beam a step needs: whatever ends, k are left."""
    return max(2, 1 + num_stop_ids) * num_beams


def best_candidates(
    logits: Logits,
    settings: SamplingSettings,
    drafts: Int32[Array, "k w"],
    parents: Int32[Array, "k w"] | None,
    number: int,
) -> Candidates:
    """Returns the best next tokens after each token of a block; see `process_drafts`."""
    # The processors change log-probabilities here, and the sum need not stay 1: transformers' order
    # in a beam search.
    logprobs = process_drafts(jax.nn.log_softmax(logits), settings, drafts, parents)
    best, tokens = jax.lax.top_k(logprobs, min(number, logits.shape[-1]))
    # A sort may put NaN first or last, by its sign.
    is_bad = jnp.isnan(logprobs).any(axis=-1, keepdims=True)
    return Candidates(jnp.where(is_bad, jnp.nan, best), tokens)


def beam_step(
    beams: Beams, candidates: Candidates, limits: BeamLimits
) -> tuple[Beams, Int32[Array, "k"], RowTokens]:
    """Takes one step.

    Args:
      beams: before it.
      candidates: after the last token of each beam, [k c]; see `num_candidates` for c.
      limits: what ends beams and the search.

    Returns:
      The beams after it; and of each running one the beam that it continues, [k], and its token.
    """
    k, c = candidates.logprobs.shape
    totals = beams.scores[:, None] + candidates.logprobs
    best, place = jax.lax.top_k(totals.ravel(), k * c)
    parent, token = place // c, candidates.tokens.ravel()[place]
    length = beams.num_steps + 1
    is_end = (token[:, None] == limits.stop_ids).any(axis=-1) | (length >= limits.max_tokens)
    scores, chosen = jax.lax.top_k(jnp.where(is_end, -jnp.inf, best), k)
    # What ends counts among the best k only: the others are there to leave k that go on.
    enters = is_end & (jnp.arange(k * c) < k)
    ended = Pool(
        jnp.where(enters, best / _penalty(length, limits), -jnp.inf),
        jnp.full_like(token, length),
        parent,
        token,
    )
    merged = jax.tree.map(lambda old, new: jnp.concatenate([old, new]), beams.pool, ended)
    kept = jax.lax.top_k(merged.scores, k)[1]
    pool = jax.tree.map(lambda leaf: leaf[kept], merged)
    # NaN, or every token forbidden to every beam.
    has_failed = jnp.isnan(totals).any() | (best[0] == -jnp.inf)
    after = beams.replace(
        scores=scores,
        num_steps=length,
        parents=beams.parents.at[beams.num_steps].set(parent[chosen]),
        tokens=beams.tokens.at[beams.num_steps].set(token[chosen]),
        pool=pool,
        is_done=has_failed | _is_over(scores[0], length, pool, limits),
        has_failed=has_failed,
    )
    return after, parent[chosen], token[chosen]


def _penalty(length: Int32[Array, ""], limits: BeamLimits) -> Float32[Array, ""]:
    return length.astype(jnp.float32) ** limits.length_penalty


def _is_over(
    best: Float32[Array, ""], length: Int32[Array, ""], pool: Pool, limits: BeamLimits
) -> Bool[Array, ""]:
    """Returns whether the search ends: nothing can improve the pool, or all has been said.

    `best` is the score of the best running beam.
    """
    # With early_stopping=False (0) no longer text is hoped for: transformers' guess, too.
    is_long = (limits.early_stopping == 2) & (limits.length_penalty > 0)
    hoped = best / _penalty(jnp.where(is_long, limits.max_tokens, length), limits)
    worst = jnp.min(pool.scores)  # -inf while the pool is not full
    is_full = (limits.early_stopping == 1) & (worst > -jnp.inf)
    return ~(hoped > worst) | is_full | (length >= limits.max_tokens)

"""Beam search: the k most likely texts so far, each step continued by their best k continuations.

    beams, scores      candidates: every beam's best tokens          next beams
    A  -1.0       ──►  A x -1.2   B x -1.5   A y -1.9   B </s> -2.0  ──►  A x   B x
    B  -1.4                                         a candidate that ends goes to the pool

A score is the sum of a text's log-probabilities; the pool ranks those that have ended by their
score / length ^ length_penalty. The rules are those of transformers' `generate(num_beams=k)`. A
text is not carried along: each step notes which beam every new one continues and by which token.

With drafts (arXiv 2211.17192, A.4), one target call serves several steps.

    beam 0 | a  d1 d2 d3      each beam is a row; the drafter gives each a chain (or a tree)
    beam 1 | b  e1 e2         ONE target call on all blocks: candidates after every token
             │
             ▼
    step 1 from a and b; step 2 if every new beam was drafted, such as a d1 and b e1, as its
    candidates are there already; and so on. The last step's beams need not be drafted.

Every step sees the log-probabilities that it would see without drafts, so beams and scores are
those of plain beam search: a round without drafts, one call a step. In the end the rows of caches
and states are put in the order of the beams that they became.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.typing import ApplyFn, Logits, RowCounts, RowTokens
from jspec.kernels import run_if
from jspec.sampling.noise import KEY_TYPE
from jspec.sampling.settings import SamplingSettings, process_drafts
from jspec.speculation.acceptance.tree import Tree, along, tree_of
from jspec.speculation.round import call_on_block, emitted_tokens, in_narrowest
from jspec.speculation.types import (
    Drafter,
    ModelParams,
    Proposal,
    RoundInputs,
    SpecState,
    TargetView,
    Verdict,
)

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
      length: tokens of each beam, its last included, [k].
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
        not exist, as before the first step all but the first.
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
    """Takes one step, by the candidates after the last token of each beam, [k c].

    Returns the beams after it; and of each running one the beam that it continues, [k], and its
    token. See `num_candidates` for c.
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
    """Returns whether nothing can improve the pool; `best` is the best running beam's score."""
    # With early_stopping=False (0) no longer text is hoped for: transformers' guess, too.
    is_long = (limits.early_stopping == 2) & (limits.length_penalty > 0)
    hoped = best / _penalty(jnp.where(is_long, limits.max_tokens, length), limits)
    worst = jnp.min(pool.scores)  # -inf while the pool is not full
    is_full = (limits.early_stopping == 1) & (worst > -jnp.inf)
    return ~(hoped > worst) | is_full | (length >= limits.max_tokens)


_Rows = TypeVar("_Rows")


class BeamState(struct.PyTreeNode):
    """Everything the next round needs. The first axis of the first four is the beam.

    Attributes:
      target_cache: every token of a beam but the newest is committed in it.
      draft: the drafter's state.
      last_token: the newest token, of the prompt or the beam, [k].
      settings: the processors have seen every token, the newest included.
      beams: scores, steps and pool.
      limits: what ends beams and the search.
      num_candidates: how many a step looks at.
    """

    target_cache: Any
    draft: Any
    last_token: RowTokens
    settings: SamplingSettings
    beams: Beams
    limits: BeamLimits
    num_candidates: int = struct.field(pytree_node=False)

    @property
    def is_done(self) -> Bool[Array, ""]:
        """Whether the search is over."""
        return self.beams.is_done

    @classmethod
    def begin(
        cls,
        read: SpecState,
        last_token: Int32[Array, "1"],
        limits: BeamLimits,
        *,
        num_beams: int,
        num_candidates: int,
        max_steps: int,
    ) -> Self:
        """Returns the state before the first step, with room for `max_steps` steps.

        `read` is a state of one row that has read the prompt, but for its last token, [1].
        """
        rows = read.target_cache, read.draft, last_token, read.settings
        return cls(
            *jax.tree.map(lambda leaf: jnp.repeat(leaf, num_beams, axis=0), rows),
            beams=Beams.init(num_beams, max_steps),
            limits=limits,
            num_candidates=num_candidates,
        )


class BeamInfo(struct.PyTreeNode):
    """What happened in one round, the same for all beams but for their drafts; each is [k].

    Attributes:
      num_steps: steps taken.
      num_proposed: drafts of each beam.
      kind: of its proposal.
      parents: of a tree, that of each draft, [k w].
    """

    num_steps: RowCounts
    num_proposed: RowCounts
    kind: RowCounts
    parents: Int32[Array, "k w"] | None


class _Walk(NamedTuple):
    beams: Beams
    num_steps: Int32[Array, ""]
    row: Int32[Array, "k"]  # of the block, which each beam goes on from
    path: Int32[Array, "k p"]  # its slots of the block so far
    slot: Int32[Array, "k"]  # the last of them; -1 where the beam is no drafted one
    last_token: RowTokens


def beam_round(
    params: ModelParams,
    state: BeamState,
    *,
    target: ApplyFn,
    drafter: Drafter | None,
    widths: Sequence[int] = (),
    most_drafts: int | None = None,
) -> tuple[BeamState, BeamInfo]:
    """Advances all beams by one step or several; without a drafter by one step: plain beam search.

    A narrower target call is compiled for each number of drafts in `widths`, which rise. No beam
    has more than `most_drafts`, by default all that the drafter can make.
    """
    proposal, state = _propose(params, state, target, drafter, most_drafts)
    verify = functools.partial(_verify_and_commit, params, target=target, drafter=drafter)
    return in_narrowest(verify, state, proposal, widths)


def _propose(
    params: ModelParams,
    state: BeamState,
    target: ApplyFn,
    drafter: Drafter | None,
    most_drafts: int | None,
) -> tuple[Proposal, BeamState]:
    k = state.last_token.shape[0]
    if drafter is None:
        none = jnp.zeros([k, 0], jnp.int32)
        return Proposal(none, jnp.zeros([k], jnp.int32)), state
    # A round takes one step more than it keeps drafts.
    room = state.limits.max_tokens - state.beams.num_steps - 1
    # A drafter has always seen a token, which it has not yet after a prompt of one token.
    is_wanted = (state.beams.scores > -jnp.inf) & (state.target_cache.length > 0)
    most = drafter.num_draft_tokens if most_drafts is None else most_drafts
    wanted = jnp.where(is_wanted, jnp.clip(room, 0, most), 0)
    no_noise = jax.random.key(0, impl=KEY_TYPE)  # temperature 0
    inputs = RoundInputs(
        state.last_token,
        limit=lambda kind: wanted,
        rng_keys=jnp.broadcast_to(no_noise, (k, drafter.num_draft_tokens)),
        settings=state.settings,
        view=TargetView(params.target, target, state.target_cache),
        is_free=True,
    )
    proposal, draft = drafter.propose(params.draft, state.draft, inputs)
    state = state.replace(draft=draft)
    if proposal.prefix is not None:  # from here on the state alone carries the cache
        state = state.replace(target_cache=proposal.prefix.cache)
        proposal = proposal.replace(prefix=proposal.prefix.replace(cache=None))
    return proposal, state


def _verify_and_commit(
    params: ModelParams,
    state: BeamState,
    proposal: Proposal,
    *,
    target: ApplyFn,
    drafter: Drafter | None,
) -> tuple[BeamState, BeamInfo]:
    tree = None if proposal.parents is None else tree_of(proposal)
    block = jnp.concatenate([state.last_token[:, None], proposal.tokens], axis=1)
    layers = () if drafter is None else drafter.hidden_layers
    logits, hidden, cache = call_on_block(
        target, params.target, block, state.target_cache, proposal, tree, layers
    )
    parents = None if tree is None else tree.parents
    candidates = best_candidates(
        logits, state.settings, proposal.tokens, parents, state.num_candidates
    )
    walk = _take_steps(state, candidates, proposal, tree)
    slots = jnp.arange(block.shape[1])
    draft = state.draft
    if drafter is not None:  # before the beams move: each has learned from its own block
        is_fed = slots <= proposal.num_tokens[:, None]
        draft = drafter.observe_logits(draft, block, logits, is_fed, is_fed & (slots == 0))
    cache, draft, settings = _reorder((cache, draft, state.settings), walk.row)
    block, hidden = block[walk.row], hidden[walk.row]
    if tree is not None:
        block, hidden = along(walk.path, (block, hidden))
    num_steps = jnp.broadcast_to(walk.num_steps, walk.row.shape)
    valid = slots[: block.shape[1]] < num_steps[:, None]
    if drafter is not None:
        draft = drafter.observe(params.draft, draft, block, hidden, valid)
    emitted = emitted_tokens(block[:, 1:], Verdict(num_steps - 1, walk.last_token))
    kind = jnp.zeros_like(num_steps) if proposal.kind is None else proposal.kind
    state = state.replace(
        target_cache=cache.commit(num_steps, None if tree is None else walk.path),
        draft=draft,
        last_token=walk.last_token,
        settings=settings.after_all(emitted, valid),
        beams=walk.beams,
    )
    return state, BeamInfo(num_steps, proposal.num_tokens, kind, proposal.parents)


def _take_steps(
    state: BeamState, candidates: Candidates, proposal: Proposal, tree: Tree | None
) -> _Walk:
    """Takes steps until one leads to a beam whose candidates are not known, or the search ends."""
    k, width = proposal.tokens.shape
    slots = jnp.arange(width)
    parents = jnp.broadcast_to(slots, (k, width)) if tree is None else tree.parents
    is_real = slots < proposal.num_tokens[:, None]

    def is_known(walk: _Walk) -> Bool[Array, ""]:
        # One that does not exist (-inf) needs no candidates.
        is_ready = (walk.slot >= 0) | (walk.beams.scores == -jnp.inf)
        return is_ready.all() & ~walk.beams.is_done

    def step(walk: _Walk) -> _Walk:
        at = jax.tree.map(lambda leaf: leaf[walk.row, jnp.maximum(walk.slot, 0)], candidates)
        beams, parent, token = beam_step(walk.beams, at, state.limits)
        row, slot, path = (leaf[parent] for leaf in (walk.row, walk.slot, walk.path))
        # Beams differ, and so do their continuations: only a beam's own drafts can be its next.
        is_next = is_real[row] & (parents[row] == slot[:, None])
        is_next &= proposal.tokens[row] == token[:, None]
        slot = jnp.max(jnp.where(is_next, slots + 1, -1), axis=1, initial=-1)
        # Of the last step there is no slot in a full path: it is dropped, as nothing follows.
        path = path.at[:, walk.num_steps + 1].set(jnp.maximum(slot, 0), mode="drop")
        return _Walk(beams, walk.num_steps + 1, row, path, slot, token)

    depth = width if tree is None else tree.max_depth
    zeros = jnp.zeros([k], jnp.int32)
    path = jnp.zeros([k, depth + 1], jnp.int32)
    rows = jnp.arange(k, dtype=jnp.int32)
    begin = _Walk(state.beams, jnp.int32(0), rows, path, zeros, state.last_token)
    return jax.lax.while_loop(is_known, step, begin)


def _reorder(rows: _Rows, row: Int32[Array, "k"]) -> _Rows:
    """Returns what every leaf [k ...] holds in these rows."""
    # Where each beam has gone on by itself nothing moves.
    is_moved = (row != jnp.arange(row.shape[0])).any()
    return run_if(is_moved, functools.partial(jax.tree.map, lambda leaf: leaf[row]), rows)

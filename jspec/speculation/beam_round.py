"""One round of beam search with drafts (arXiv 2211.17192, A.4): one target call, several steps.

    beam 0 | a  d1 d2 d3      each beam is a row; the drafter gives each a chain (or a tree)
    beam 1 | b  e1 e2         ONE target call on all blocks: candidates after every token
             │
             ▼
    step 1 from a and b; step 2 if every new beam is a drafted one, such as a d1 and b e1, as its
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
from jaxtyping import Array, Bool, Int32

from jspec.common.typing import ApplyFn, RowCounts, RowTokens
from jspec.kernels import run_if
from jspec.sampling.noise import KEY_TYPE
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.acceptance.tree import Tree, along, tree_of
from jspec.speculation.acceptance.types import Proposal, Verdict
from jspec.speculation.beam import BeamLimits, Beams, Candidates, beam_step, best_candidates
from jspec.speculation.ends import emitted_tokens
from jspec.speculation.runners_up import show_runners_up
from jspec.speculation.types import Drafter, ModelParams, RoundInputs, SpecState, TargetView
from jspec.speculation.verify_call import call_on_block, in_narrowest

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
        """Returns the state before the first step.

        Args:
          read: a state of one row that has read the prompt, but for its last token.
          last_token: that token.
          limits: what ends beams and the search.
          num_beams: k.
          num_candidates: how many a step looks at, see `num_candidates`.
          max_steps: room for steps.
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
    """Where the steps of a round have come to."""

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
) -> tuple[BeamState, BeamInfo]:
    """Advances all beams by one step or several; without a drafter by one: plain beam search.

    A narrower target call is compiled for each number of drafts in `widths`, which rise.
    """
    proposal, state = _propose(params, state, target, drafter)
    verify = functools.partial(_verify_and_commit, params, target=target, drafter=drafter)
    return in_narrowest(verify, state, proposal, widths)


def _propose(
    params: ModelParams, state: BeamState, target: ApplyFn, drafter: Drafter | None
) -> tuple[Proposal, BeamState]:
    k = state.last_token.shape[0]
    if drafter is None:
        none = jnp.zeros([k, 0], jnp.int32)
        return Proposal(none, jnp.zeros([k], jnp.int32)), state
    # A round takes one step more than it keeps drafts.
    room = state.limits.max_tokens - state.beams.num_steps - 1
    # A drafter has always seen a token, which it has not yet after a prompt of one.
    is_wanted = (state.beams.scores > -jnp.inf) & (state.target_cache.length > 0)
    wanted = jnp.where(is_wanted, jnp.clip(room, 0, drafter.num_draft_tokens), 0)
    no_noise = jax.random.key(0, impl=KEY_TYPE)  # temperature 0
    inputs = RoundInputs(
        state.last_token,
        limit=lambda kind: wanted,
        rng_keys=jnp.broadcast_to(no_noise, (k, drafter.num_draft_tokens)),
        settings=state.settings,
        view=TargetView(params.target, target, state.target_cache),
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
    logits, hidden, cache = call_on_block(
        target, params.target, block, state.target_cache, proposal, tree, drafter
    )
    parents = None if tree is None else tree.parents
    candidates = best_candidates(
        logits, state.settings, proposal.tokens, parents, state.num_candidates
    )
    walk = _take_steps(state, candidates, proposal, tree)
    slots = jnp.arange(block.shape[1])
    # Before the beams move: each has learned from its own block.
    is_fed = slots <= proposal.num_tokens[:, None]
    draft = show_runners_up(drafter, state.draft, block, logits, is_fed, is_fed & (slots == 0))
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
    own = jnp.arange(k, dtype=jnp.int32)
    begin = _Walk(state.beams, jnp.int32(0), own, path, zeros, state.last_token)
    return jax.lax.while_loop(is_known, step, begin)


def _reorder(rows: _Rows, row: Int32[Array, "k"]) -> _Rows:
    """Returns what every leaf [k ...] holds in these rows."""
    # Where each beam has gone on by itself nothing moves.
    is_moved = (row != jnp.arange(row.shape[0])).any()
    return run_if(is_moved, functools.partial(jax.tree.map, lambda leaf: leaf[row]), rows)

"""One round of speculative decoding (arXiv 2211.17192, 2302.01318).

    last token ──► the drafter proposes d1 … dw
                   │
                   ▼
    ONE target call on the block [last token, d1 … dw] gives the target's distribution after each
                   │
                   ▼
    the acceptance rule keeps the first n drafts, and says which token follows them
                   │
                   ▼
    commit: the cache grows by n + 1 tokens, and the round emits d1 … dn and the next token

The drafts may also form a tree, of which the rule keeps one path; see `acceptance.tree`.

Why the output is exact: the target's logits at a block token depend on the tokens before it alone,
so those at the accepted drafts are the ones that plain decoding would have computed there. What
becomes of these distributions is the acceptance rule's part; see `speculation.acceptance`.

The newest token has been emitted, but no model has consumed it: its keys and values are computed as
the first token of the next block. Rejected drafts leave keys and values in the cache, in
slots after `length`. Those are not visible, and the next block overwrites them.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Key

from jspec.common.typing import ApplyFn, RowCounts, RowFlags
from jspec.sampling.noise import KEY_TYPE, SHARED
from jspec.sampling.settings import COLDEST, process_drafts
from jspec.speculation.acceptance import is_match_at_zero
from jspec.speculation.acceptance.tree import Tree, along, tree_of
from jspec.speculation.acceptance.types import AcceptanceRule, Proposal, Verdict
from jspec.speculation.best_nodes import prune
from jspec.speculation.control import Control
from jspec.speculation.ends import cut_at_end, emitted_tokens, silence
from jspec.speculation.judge import judge
from jspec.speculation.logprobs import token_logprobs
from jspec.speculation.runners_up import learn
from jspec.speculation.shared_round import agree, with_own_costs
from jspec.speculation.types import (
    Drafter,
    ModelParams,
    RoundInputs,
    SpecState,
    StepInfo,
    TargetView,
    lag_of,
)
from jspec.speculation.verify_call import as_read, call_on_block, in_narrowest, with_whole_logits


def speculative_step(
    params: ModelParams,
    state: SpecState,
    *,
    target: ApplyFn,
    drafter: Drafter,
    rule: AcceptanceRule,
    widths: Sequence[int] = (),
) -> tuple[SpecState, StepInfo]:
    """Advances every row by one round, each by its own number of tokens.

    Besides the verify call of a full proposal, a narrower one is compiled for each number of drafts
    in `widths`, which rise.
    """
    proposal, state = propose(params, state, target=target, drafter=drafter, rule=rule)
    return verify(params, state, proposal, target=target, drafter=drafter, rule=rule, widths=widths)


def propose(
    params: ModelParams,
    state: SpecState,
    *,
    target: ApplyFn,
    drafter: Drafter,
    rule: AcceptanceRule,
) -> tuple[Proposal, SpecState]:
    """Runs the first half: returns the proposal, and the state that `verify` takes with it."""
    state = state.replace(settings=state.settings.after(state.last_token))
    # The drafter samples as the target does, with the same processors and filters, but at its own
    # temperature. The proposal then says from which distributions the drafts were really drawn.
    settings = state.settings.replace(temperature=state.draft_temperature)
    inputs = RoundInputs(
        state.last_token,
        limit=functools.partial(_wanted, state, drafter, rule),
        rng_keys=_draft_keys(rule, state, drafter.num_draft_tokens, settings.is_random),
        settings=settings,
        view=TargetView(params.target, with_whole_logits(target), state.target_cache),
        has_shared_noise=rule.noise is SHARED,
        reads_probs=state.settings.is_random | (not is_match_at_zero(rule)),
    )
    proposal, draft = drafter.propose(params.draft, state.draft, inputs)
    if state.control is not None and proposal.scores is not None:
        control = _control(state, rule)
        proposal = prune(proposal, control.choose_nodes(_kinds(proposal), proposal.scores))
    if state.control is not None:
        kind = _kinds(proposal)
        lag = functools.partial(lag_of, drafter, state.draft)
        read = jnp.where(proposal.num_tokens > 0, lag(kind), 0)
        control = _control(state, rule).charge(kind, read)
        asked = inputs.limit, lag, proposal.silent
        control = control.after_silence(kind, proposal.num_tokens, *asked)
        if proposal.parents is None:  # each row may have found drafts, and one alone makes all wait
            is_free = _is_free(state, rule)
            agreed = agree(control, kind, proposal.num_tokens, ~state.is_done, is_free)
            proposal = proposal.replace(num_tokens=agreed)
        state = state.replace(control=control.replace(costs=state.control.costs))
    state = state.replace(draft=draft)
    if proposal.prefix is not None:
        # From here on the state alone carries the cache, with the first layers' slots written.
        state = state.replace(target_cache=proposal.prefix.cache)
        proposal = proposal.replace(prefix=proposal.prefix.replace(cache=None))
    return _end_at_no_token(proposal), state


def verify(
    params: ModelParams,
    state: SpecState,
    proposal: Proposal,
    *,
    target: ApplyFn,
    drafter: Drafter,
    rule: AcceptanceRule,
    widths: Sequence[int] = (),
) -> tuple[SpecState, StepInfo]:
    """Runs the second half: one target call, the verdict, the commit; see `speculative_step`."""
    # In the smallest width that holds every row's drafts, so that few drafts cost little.
    commit = functools.partial(
        _verify_and_commit, params, target=target, drafter=drafter, rule=rule
    )
    return in_narrowest(commit, state, proposal, widths)


def _verify_and_commit(
    params: ModelParams,
    state: SpecState,
    proposal: Proposal,
    *,
    target: ApplyFn,
    drafter: Drafter,
    rule: AcceptanceRule,
) -> tuple[SpecState, StepInfo]:
    """Calls the target once on the whole block, lets the rule decide, and commits."""
    cache = state.target_cache
    tree = None if proposal.parents is None else tree_of(proposal)
    block = jnp.concatenate([state.last_token[:, None], proposal.tokens], axis=1)
    logits, hidden, cache = call_on_block(
        target, params.target, block, cache, proposal, tree, drafter
    )
    # The processors see each position with its own prefix: penalties count the drafts before it.
    settings = state.settings  # they have seen the last token: see `propose`
    logits = as_read(logits, settings, drafter)
    parents = None if tree is None else tree.parents
    processed = process_drafts(logits, settings, proposal.tokens, parents)
    # The cache holds every token but the newest, so the round's first token has position
    # length + 1. It keys the noise of the whole round.
    verdict, probs = judge(
        rule, processed, settings.without_processors(), proposal, state.seed, cache.length + 1, tree
    )
    state = learn(drafter, state, block, processed, proposal, verdict)
    if verdict.path is not None:
        # From here on the kept path of a tree is a chain.
        block, hidden, logits, probs = along(verdict.path, (block, hidden, logits, probs))
    tokens = emitted_tokens(block[:, 1:], verdict)
    num_tokens, is_done = cut_at_end(state, tokens, verdict.num_accepted + 1)
    # A round emits the accepted drafts and the next token, and consumes as many: the last token and
    # the accepted drafts. So the first `num_tokens` tokens of the block are committed.
    valid = jnp.arange(block.shape[1]) < num_tokens[:, None]
    last = jnp.take_along_axis(tokens, jnp.maximum(num_tokens - 1, 0)[:, None], axis=1)[:, 0]
    # Rejected drafts are rolled back by not being committed: `length` stops before their slots.
    state = state.replace(
        target_cache=cache.commit(num_tokens, verdict.path),
        draft=drafter.observe(params.draft, state.draft, block, hidden, valid),
        last_token=jnp.where(state.is_done, state.last_token, last),
        settings=settings.after_all(block[:, 1:], valid[:, 1:]),
    )
    counts = proposal.num_tokens, verdict.num_accepted
    kind = _kinds(proposal)
    if state.control is not None:
        is_refused = _is_refused(verdict, tree)
        control = _control(state, rule).update(kind, *counts, ~state.is_done, is_refused)
        state = state.replace(control=control.replace(costs=state.control.costs))
    state = silence(state, is_done)
    logprobs = None if probs is None else token_logprobs(logits, probs, tokens, settings)
    drafts = proposal.tokens, proposal.parents
    return state, StepInfo(tokens, num_tokens, *counts, kind, logprobs, *drafts)


def _draft_keys(
    rule: AcceptanceRule, state: SpecState, width: int, is_random: Bool[Array, ""]
) -> Key[Array, "b w"]:
    """Returns the keys of the drafts; a batch without randomness gets equal ones, for nothing."""

    def derive() -> Key[Array, "b w"]:
        return rule.noise.draft_keys(state.seed, state.target_cache.length + 1, width)

    def skip() -> Key[Array, "b w"]:
        return jnp.broadcast_to(jax.random.key(0, impl=KEY_TYPE), (state.seed.shape[0], width))

    return jax.lax.cond(is_random, derive, skip)


def _is_free(state: SpecState, rule: AcceptanceRule) -> RowFlags:
    """Returns which rows have the same tokens with any number of drafts, [b]."""
    is_greedy = state.settings.temperature < COLDEST
    return (is_greedy | (rule.noise is SHARED)) & rule.is_lossless


def _control(state: SpecState, rule: AcceptanceRule) -> Control:
    """Returns the control with the costs of a round of as many rows as the state has."""
    assert state.control is not None
    return with_own_costs(state.control, _is_free(state, rule))


def _wanted(state: SpecState, drafter: Drafter, rule: AcceptanceRule, kind: RowCounts) -> RowCounts:
    """Returns how many drafts each row wants at most, from a proposal of the given kinds [b]."""
    room = state.max_length - (state.target_cache.length + 1)
    # A round emits one token more than it accepts, so the last token needs no draft.
    wanted = jnp.clip(room - 1, 0, drafter.num_draft_tokens)
    if state.control is not None:
        lag = functools.partial(lag_of, drafter, state.draft)
        control = _control(state, rule)
        wanted = jnp.minimum(wanted, control.choose(kind, lag, room))
        # As if all rows had proposals of their kind, so that none is made for nothing.
        wanted = agree(control, kind, wanted, ~state.is_done, _is_free(state, rule))
    return jnp.where(state.is_done, 0, wanted)


def _kinds(proposal: Proposal) -> RowCounts:
    """Returns the kind of each row's proposal, [b]: the first where a drafter has only one."""
    return jnp.zeros_like(proposal.num_tokens) if proposal.kind is None else proposal.kind


def _is_refused(verdict: Verdict, tree: Tree | None) -> RowFlags | None:
    """Returns whether drafts went on where a tree's kept path ends, [b]; None for a chain."""
    if tree is None or verdict.path is None:
        return None
    end = jnp.take_along_axis(verdict.path, verdict.num_accepted[:, None], axis=1)
    return (tree.is_real & (tree.parents == end)).any(axis=1)


def _end_at_no_token(proposal: Proposal) -> Proposal:
    """Ends each row's drafts before NO_TOKEN, which a drafter draws from no distribution."""
    num_real = jnp.sum(jnp.cumprod(proposal.tokens >= 0, axis=1, dtype=jnp.int32), axis=1)
    return proposal.replace(num_tokens=jnp.minimum(proposal.num_tokens, num_real))

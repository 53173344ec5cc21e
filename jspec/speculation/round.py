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
so those at the accepted drafts are the ones that plain decoding would have computed there. The
acceptance rule decides by these distributions.

The newest token has been emitted, but no model has consumed it: its keys and values are computed as
the first token of the next block. Rejected drafts leave keys and values in slots after `length`,
which are not visible, and which the next block overwrites.

In the order of the file: the verify call, in the width that is needed; the verdict; what is
emitted, and where a row ends; and the round made of these.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Key

from jspec.common.typing import (
    AnyLogits,
    ApplyFn,
    DraftTokens,
    Logits,
    Params,
    RowCounts,
    RowFlags,
    RowSeeds,
    TargetProbs,
    Tokens,
)
from jspec.kernels import row_major, run_if, whole
from jspec.sampling.distribution import sample, token_logprobs
from jspec.sampling.noise import KEY_TYPE, AcceptanceNoise
from jspec.sampling.settings import COLDEST, SamplingSettings, Switches, process_drafts
from jspec.speculation.acceptance.chain import match
from jspec.speculation.acceptance.tree import Tree, along, match_tree, prune, tree_of
from jspec.speculation.budget import CallSize, grant, smallest_call
from jspec.speculation.control import Control, Demand, agree
from jspec.speculation.packing import Packing, judge_packed
from jspec.speculation.types import (
    AcceptanceRule,
    Drafter,
    LimitFn,
    ModelParams,
    Proposal,
    RoundInputs,
    SpecState,
    StepInfo,
    TargetView,
    Verdict,
)

_State = TypeVar("_State")


@jax.named_scope("target")
def call_on_block(
    target: ApplyFn,
    params: Params,
    block: Tokens,
    cache: Any,
    proposal: Proposal,
    tree: Tree | None,
    hidden_layers: Sequence[int],
    packing: Packing | None = None,
) -> tuple[AnyLogits, Array, Any]:
    """Returns the target's logits and hidden states on [newest token, drafts], and its cache.

    With a packing, of chains, only the tokens in it are computed, and the logits are [n 1 v].
    """
    inputs: Array = block
    options: dict[str, Any] = {"hidden_layers": hidden_layers}
    if proposal.prefix is not None:  # the drafter has run the first layers on this very block
        inputs = proposal.prefix.hidden
        options["first_layer"] = proposal.prefix.num_layers
    if packing is not None:
        return packing.call(target, params, inputs, cache, **options)
    if tree is not None:
        positions = cache.length[:, None] + tree.depths
        options |= {"positions": positions, "block_mask": tree.mask}
    return target(params, inputs, cache, **options)


def with_whole_logits(target: ApplyFn) -> ApplyFn:
    """Returns the model with whole logits, as drafters and beams read them."""

    def apply(*arguments: Any, **options: Any) -> Any:
        logits, hidden, cache = target(*arguments, **options)
        return whole(logits), hidden, cache

    return apply


def as_read(
    logits: AnyLogits, settings: SamplingSettings, drafter: Drafter | None = None
) -> AnyLogits:
    """Returns logits whole if processors, log-probabilities or a drafter read them all."""
    return whole(logits) if reads_logits(settings.switches, drafter) else logits


def reads_logits(switches: Switches, drafter: Drafter | None) -> bool:
    """Returns whether logits are read for more than the verdict of the rule."""
    is_observed = drafter is not None and drafter.num_runners_up > 0
    return bool(switches.processors) or switches.logprobs or is_observed


def in_narrowest(
    verify: Callable[[_State, Proposal], tuple[_State, Any]],
    state: _State,
    proposal: Proposal,
    widths: Sequence[int],
) -> tuple[_State, Any]:
    """Returns what `verify` does with the proposal, cut to the smallest width that is enough.

    Which of `widths`, which rise, that is, or whether the whole proposal is needed, is known on the
    device only; see `in_smallest`.
    """
    widths = [width for width in widths if width < proposal.width] + [proposal.width]
    # The row with the most drafts decides: a batch has one width.
    num_needed = jnp.max(proposal.num_tokens)
    calls = [(width, verify, width) for width in widths]
    return in_smallest(calls, num_needed, state, proposal)


def in_smallest(
    calls: Sequence[tuple[int, Callable[[_State, Proposal], tuple[_State, Any]], int]],
    num_needed: Int32[Array, ""],
    state: _State,
    proposal: Proposal,
) -> tuple[_State, Any]:
    """Returns what the smallest call does that is enough for `num_needed`.

    Each of the calls has a size, in rising order, what it does, and the width to which the proposal
    is cut for it; the last one's is the whole proposal. The info, the second of the results, is
    padded to its shape at full width.
    """
    if len(calls) == 1:
        return calls[0][1](state, proposal)
    # Under jit the last one is traced once for its shapes and for the loop.
    calls = [(size, jax.jit(call, inline=True), width) for size, call, width in calls]
    shapes = jax.eval_shape(calls[-1][1], state, proposal)[1]
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    info = empty

    def pad(leaf: Array, wider: Array) -> Array:
        return jnp.pad(leaf, [(0, w - n) for n, w in zip(leaf.shape, wider.shape, strict=True)])

    too_few = -1
    for size, call, width in calls:

        def run(
            carry: tuple[_State, Any], call: Any = call, width: int = width
        ) -> tuple[_State, Any]:
            state, info = carry
            # Beside something that changes, or XLA cuts the proposal before the loop, for nothing.
            changing = jax.tree.leaves(info)[0]
            _, uncut = jax.lax.optimization_barrier((changing, proposal))
            state, info = call(state, uncut.narrow(width))
            return state, jax.tree.map(pad, info, empty)

        is_fitting = (too_few < num_needed) & (num_needed <= size)
        state, info = run_if(is_fitting, run, (state, info))
        too_few = size
    return state, info


@jax.named_scope("choice")
def judge(
    rule: AcceptanceRule,
    logits: AnyLogits,
    settings: SamplingSettings,
    proposal: Proposal,
    seed: RowSeeds,
    position: RowCounts,
    tree: Tree | None = None,
) -> tuple[Verdict, TargetProbs | None]:
    """Decides which drafts are accepted, and which token follows them.

    The logits are the target's at each block token, [b w+1 v], after the processors, which the
    settings no longer have. The position of the round's first token keys the noise. The target's
    distributions, [b w+1 v], are returned too if the settings ask for log-probabilities.
    """
    width, has_logprobs = proposal.width, settings.switches.logprobs

    def by_distribution() -> tuple[Verdict, TargetProbs | None]:
        probs = rule.distribution(logits if rule.draws_only else whole(logits), settings)
        size = probs.shape[-1], settings.is_random
        if tree is None:
            noise = rule.noise.acceptance(seed, position, width, *size)
            verdict = _decide(rule, probs, proposal.as_judged(), noise)
        else:
            noise = rule.tree.noise(seed, position, tree, *size)
            verdict = rule.tree.accept(probs, proposal.as_judged(), tree, noise)
        return verdict, probs if has_logprobs else None

    def by_match() -> tuple[Verdict, TargetProbs | None]:
        probs = rule.distribution(logits, settings) if has_logprobs else None
        matched = match(logits, proposal) if tree is None else match_tree(logits, proposal, tree)
        return matched, probs

    if not rule.matches_at_zero:
        return by_distribution()
    # Where all temperatures are 0, comparing tokens decides the same, and no distribution over the
    # vocabulary need be computed.
    return jax.lax.cond(settings.is_random, by_distribution, by_match)


def _decide(
    rule: AcceptanceRule, probs: TargetProbs, proposal: Proposal, noise: AcceptanceNoise
) -> Verdict:
    """Applies the rule; a proposal of width 0 leaves only the next token to draw."""
    if proposal.width > 0:
        return rule.accept(probs, proposal, noise)
    # Rules may assume at least one draft; without any, all of them draw the next token alike.
    none = jnp.zeros_like(proposal.num_tokens)
    gumbel = noise.gumbel if noise.gumbel.ndim == 2 else noise.gumbel[:, 0]  # shared noise
    return Verdict(none, sample(rule.next_token_probs(probs, proposal, none), gumbel))


def learn(
    drafter: Drafter,
    state: SpecState,
    block: Tokens,
    logits: Logits,
    proposal: Proposal,
    verdict: Verdict,
) -> SpecState:
    """Returns the state after the drafter has seen the target's likeliest tokens, if it asks.

    `logits` are those after each token of the block, processed.
    """
    if drafter.num_runners_up == 0:
        return state
    slots = jnp.arange(block.shape[1])
    # What follows padding depends on the other rows, whose drafts make the block as wide as it is.
    is_fed = (slots <= proposal.num_tokens[:, None]) & ~state.is_done[:, None]
    is_kept = slots <= verdict.num_accepted[:, None]
    if verdict.path is not None:
        rows = jnp.arange(len(block))[:, None]
        is_kept = is_kept[:, : verdict.path.shape[1]]
        is_kept = jnp.zeros_like(is_fed).at[rows, verdict.path].max(is_kept)
    draft = drafter.observe_logits(state.draft, block, logits, is_fed, is_fed & is_kept)
    return state.replace(draft=draft)


def emitted_tokens(drafts: DraftTokens, verdict: Verdict) -> Int32[Array, "b w+1"]:
    """Returns the accepted drafts of [b w] and then the next token; the rest means nothing."""
    next_token = verdict.next_token[:, None]
    if drafts.shape[1] == 0:
        return next_token  # where empty arrays are padded, XLA may lose a program's C++ calls
    index = jnp.arange(drafts.shape[1] + 1)
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    return jnp.where(index == verdict.num_accepted[:, None], next_token, padded)


def cut_at_end(
    state: SpecState, tokens: Int32[Array, "b t"], num_tokens: RowCounts
) -> tuple[RowCounts, RowFlags]:
    """Returns how many of a round's tokens each row emits, and whether it is done then.

    `num_tokens` says how many of the tokens the round would emit. The state is that before it.
    """
    index = jnp.arange(tokens.shape[1])
    is_stop = (tokens[:, :, None] == state.stop_ids[:, None, :]).any(axis=-1)
    is_stop |= tokens < 0  # NO_TOKEN: there was no distribution to draw from, so the row must end
    is_stop &= index < num_tokens[:, None]
    first_stop = jnp.min(jnp.where(is_stop, index, tokens.shape[1]), axis=1)
    num_tokens = jnp.minimum(num_tokens, first_stop + 1)  # the stop token itself is emitted
    # Done rows take part in every call of the batch, but emit and commit nothing.
    num_tokens = jnp.where(state.is_done, 0, num_tokens)
    # No limit on `num_tokens` is needed for the length: no more drafts were asked for than fit.
    length = state.target_cache.length + 1 + num_tokens
    return num_tokens, state.is_done | is_stop.any(axis=1) | (length >= state.max_length)


def silence(state: SpecState, is_done: RowFlags) -> SpecState:
    """Marks rows as done, and makes them greedy: noise is drawn only while a row needs it."""
    return state.replace(
        settings=state.settings.replace(
            temperature=jnp.where(is_done, 0.0, state.settings.temperature)
        ),
        draft_temperature=jnp.where(is_done, 0.0, state.draft_temperature),
        is_done=is_done,
    )


def speculative_step(
    params: ModelParams,
    state: SpecState,
    *,
    target: ApplyFn,
    drafter: Drafter,
    rule: AcceptanceRule,
    widths: Sequence[int] = (),
    sizes: Sequence[CallSize] = (),
) -> tuple[SpecState, StepInfo]:
    """Advances every row by one round, each by its own number of tokens.

    Besides the verify call of a full proposal, a narrower one is compiled for each number of drafts
    in `widths`, which rise. With `sizes`, which are for chains, the rows' blocks lie side by side
    instead, in the smallest of these calls that is enough; see `packing` and `budget`.
    """
    shared: Any = {"target": target, "drafter": drafter, "rule": rule, "sizes": sizes}
    proposal, state = propose(params, state, **shared)
    return verify(params, state, proposal, widths=widths, **shared)


@jax.named_scope("draft")
def propose(
    params: ModelParams,
    state: SpecState,
    *,
    target: ApplyFn,
    drafter: Drafter,
    rule: AcceptanceRule,
    sizes: Sequence[CallSize] = (),
) -> tuple[Proposal, SpecState]:
    """Runs the first half: returns the proposal, and the state that `verify` takes with it."""
    state = state.replace(settings=state.settings.after(state.last_token))
    # The proposal then says from which distributions the drafts were really drawn.
    settings = state.draft_settings
    inputs = RoundInputs(
        state.last_token,
        limit=functools.partial(_wanted, state, drafter, rule, bool(sizes)),
        rng_keys=_draft_keys(rule, state, drafter.num_draft_tokens, settings.is_random),
        settings=settings,
        view=TargetView(params.target, with_whole_logits(target), state.target_cache),
        has_shared_noise=rule.noise.is_shared,
        reads_probs=state.settings.is_random | (not rule.matches_at_zero),
        is_free=_is_free(state, rule),
    )
    proposal, draft = drafter.propose(params.draft, state.draft, inputs)
    if state.control is not None:
        proposal, control = _weigh(
            state.control, state, proposal, inputs.limit, drafter, rule, sizes
        )
        state = state.replace(control=control)
    state = state.replace(draft=draft)
    if proposal.prefix is not None:
        # From here on the state alone carries the cache, with the first layers' slots written.
        state = state.replace(target_cache=proposal.prefix.cache)
        proposal = proposal.replace(prefix=proposal.prefix.replace(cache=None))
    return _end_at_no_token(proposal), state


def _weigh(
    control: Control,
    state: SpecState,
    proposal: Proposal,
    wanted: LimitFn,
    drafter: Drafter,
    rule: AcceptanceRule,
    sizes: Sequence[CallSize],
) -> tuple[Proposal, Control]:
    """Leaves of a proposal what is worth verifying; returns it, and the control after drafting."""
    is_free, kind = _is_free(state, rule), _kinds(proposal)
    costs = control.round_costs(is_free)
    if proposal.scores is not None:
        proposal = prune(proposal, control.choose_nodes(costs, kind, proposal.scores))
    lag = functools.partial(drafter.lag, state.draft)
    control = control.charge(kind, jnp.where(proposal.num_tokens > 0, lag(kind), 0))
    control = control.after_silence(costs, kind, proposal.num_tokens, wanted, lag, proposal.silent)
    if proposal.parents is None:
        # Each row may have found drafts: they share a call, or one row alone makes all wait.
        share = functools.partial(grant, sizes=sizes) if sizes else agree
        demand = Demand(control, costs, kind, proposal.num_tokens, ~state.is_done, is_free)
        proposal = proposal.replace(num_tokens=share(demand))
    return proposal, control


def verify(
    params: ModelParams,
    state: SpecState,
    proposal: Proposal,
    *,
    target: ApplyFn,
    drafter: Drafter,
    rule: AcceptanceRule,
    widths: Sequence[int] = (),
    sizes: Sequence[CallSize] = (),
) -> tuple[SpecState, StepInfo]:
    """Runs the second half: one target call, the verdict, the commit; see `speculative_step`."""
    commit = functools.partial(
        _verify_and_commit, params, target=target, drafter=drafter, rule=rule
    )
    if not sizes:
        # In the smallest width that holds every row's drafts, so that few drafts cost little.
        return in_narrowest(commit, state, proposal, widths)
    # By their numbers; the first one is that without drafts, for which nothing is put side by side.
    calls: list[Any] = [(0, commit, 0)]
    for number, size in enumerate(sizes, start=1):
        width = min(size.drafts, proposal.width)
        calls.append((number, functools.partial(commit, size=size.tokens), width))
    counts = _tokens_in_call(state, proposal)
    drafts = jnp.max(counts - 1, initial=0, keepdims=True)
    number = 1 + smallest_call(counts.sum(keepdims=True), drafts, sizes)[0]
    return in_smallest(calls, jnp.where(drafts[0] > 0, number, 0), state, proposal)


def _tokens_in_call(state: SpecState, proposal: Proposal) -> RowCounts:
    """Returns how many tokens of its block each row has in a call on blocks side by side, [b]."""
    return jnp.where(state.is_done, 0, 1 + proposal.num_tokens)


def _verify_and_commit(
    params: ModelParams,
    state: SpecState,
    proposal: Proposal,
    *,
    target: ApplyFn,
    drafter: Drafter,
    rule: AcceptanceRule,
    size: int | None = None,
) -> tuple[SpecState, StepInfo]:
    """Calls the target once, lets the rule decide, and commits.

    The call is on whole blocks, or side by side on `size` tokens.
    """
    cache, packing = state.target_cache, None
    if size is not None:
        counts = _tokens_in_call(state, proposal)
        packing = Packing.of(counts, size, proposal.width + 1)
    tree = None if proposal.parents is None else tree_of(proposal)
    block = jnp.concatenate([state.last_token[:, None], proposal.tokens], axis=1)
    logits, hidden, cache = call_on_block(
        target, params.target, block, cache, proposal, tree, drafter.hidden_layers, packing
    )
    logits = jax.tree.map(row_major, logits)  # a device's part, where they are split
    # The processors see each position with its own prefix: penalties count the drafts before it.
    settings = state.settings  # they have seen the last token: see `propose`
    # The cache holds every token but the newest, so the round's first token has position
    # length + 1. It keys the noise of the whole round.
    position, probs = cache.length + 1, None
    if packing is not None and not reads_logits(settings.switches, drafter):
        verdict = judge_packed(rule, packing, logits, settings, proposal, state.seed, position)
    else:
        if packing is not None:
            logits = packing.unpack(logits)
        logits = as_read(logits, settings, drafter)
        parents = None if tree is None else tree.parents
        processed = process_drafts(logits, settings, proposal.tokens, parents)
        verdict, probs = judge(
            rule, processed, settings.without_processors(), proposal, state.seed, position, tree
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
    with jax.named_scope("observe"):
        draft = drafter.observe(params.draft, state.draft, block, hidden, valid)
    # Rejected drafts are rolled back by not being committed: `length` stops before their slots.
    state = state.replace(
        target_cache=cache.commit(num_tokens, verdict.path),
        draft=draft,
        last_token=jnp.where(state.is_done, state.last_token, last),
        settings=settings.after_all(block[:, 1:], valid[:, 1:]),
    )
    counts = proposal.num_tokens, verdict.num_accepted
    kind = _kinds(proposal)
    if state.control is not None:
        costs = state.control.round_costs(_is_free(state, rule))
        is_refused = _is_refused(verdict, tree)
        control = state.control.update(costs, kind, *counts, ~state.is_done, is_refused)
        state = state.replace(control=control)
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
    return (is_greedy | rule.noise.is_shared) & rule.is_lossless


def _wanted(
    state: SpecState, drafter: Drafter, rule: AcceptanceRule, is_side_by_side: bool, kind: RowCounts
) -> RowCounts:
    """Returns how many drafts each row wants at most, from a proposal of the given kinds [b]."""
    room = state.max_length - (state.target_cache.length + 1)
    # A round emits one token more than it accepts, so the last token needs no draft.
    wanted = jnp.clip(room - 1, 0, drafter.num_draft_tokens)
    if state.control is not None:
        lag = functools.partial(drafter.lag, state.draft)
        is_free = _is_free(state, rule)
        costs = state.control.round_costs(is_free)
        wanted = jnp.minimum(wanted, state.control.choose(costs, kind, lag, room))
        # As if all rows had proposals of their kind, so that none is made for nothing. Where blocks
        # lie side by side, a draft that was looked up costs nothing before it is verified.
        agreed = agree(Demand(state.control, costs, kind, wanted, ~state.is_done, is_free))
        is_cheap = is_side_by_side & ~state.control.runs_model(kind)
        wanted = jnp.where(is_cheap, wanted, agreed)
    return jnp.where(state.is_done, 0, wanted)


def _kinds(proposal: Proposal) -> RowCounts:
    """Returns the kind of each row's proposal, [b]: the first where a drafter has only one kind."""
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

"""One round of speculative decoding: propose, verify, accept, commit."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, Key

from jspec.common.typing import ApplyFn, DraftTokens, RowCounts
from jspec.sampling.distribution import process_block
from jspec.sampling.noise import KEY_TYPE
from jspec.speculation.acceptance.types import AcceptanceRule, Proposal, Verdict
from jspec.speculation.ends import cut_at_end, silence
from jspec.speculation.judge import judge
from jspec.speculation.logprobs import token_logprobs
from jspec.speculation.types import (
    Drafter,
    ModelParams,
    SpecState,
    StepInfo,
    TargetView,
    lag_of,
    observed_layers,
)


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

    Args:
      params: both sides' parameters.
      state: before the round.
      target: the target's ApplyFn.
      drafter: what proposes.
      rule: what decides.
      widths: narrower than a full proposal, at which a verify call is compiled too, rising.

    Returns:
      The state after it, and what happened.
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
    """The round's first half; see `speculative_step`.

    Returns:
      What is put forward, and the state that `verify` takes with it.
    """
    settings = state.settings.after(state.last_token).replace(temperature=state.draft_temperature)
    proposal, draft = drafter.propose(
        params.draft,
        state.draft,
        state.last_token,
        limit=functools.partial(_wanted, state, drafter),
        rng_keys=_draft_keys(rule, state, drafter.num_draft_tokens, settings.is_random),
        settings=settings,
        view=TargetView(params.target, target, state.target_cache),
    )
    state = state.replace(draft=draft)
    if proposal.prefix is not None:
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
    """The second half: one target call, the verdict, and what follows; see `speculative_step`."""
    verify_and_commit = functools.partial(
        _verify_and_commit, params, target=target, drafter=drafter, rule=rule
    )
    return _at_fitting_width(verify_and_commit, state, proposal, widths)


_Choice = tuple[Array, SpecState, StepInfo]
VerifyFn = Callable[[SpecState, Proposal], tuple[SpecState, StepInfo]]


def _at_fitting_width(
    verify: VerifyFn, state: SpecState, proposal: Proposal, widths: Sequence[int]
) -> tuple[SpecState, StepInfo]:
    """Verifies at the smallest of some widths that holds every row's drafts.

    A drafter that has little to say then costs little. While loops of zero or one trips choose: a
    `lax.cond` would copy the caches that it carries.
    """
    widths = [width for width in widths if width < proposal.width] + [proposal.width]
    if len(widths) == 1:
        return verify(state, proposal)
    num_needed = jnp.max(proposal.num_tokens)
    shapes = jax.eval_shape(verify, state, proposal)[1]
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    info = empty
    for too_few, width in zip([-1, *widths], widths, strict=False):
        narrow = proposal.narrow(width)

        def body(carry: _Choice, narrow: Proposal = narrow) -> _Choice:
            state, info = verify(carry[1], narrow)
            return jnp.array(False), state, jax.tree.map(_pad_like, info, empty)

        is_fitting = (too_few < num_needed) & (num_needed <= width)
        _, state, info = jax.lax.while_loop(lambda carry: carry[0], body, (is_fitting, state, info))
    return state, info


def _pad_like(leaf: Array, wider: Array) -> Array:
    return jnp.pad(leaf, [(0, w - n) for n, w in zip(leaf.shape, wider.shape, strict=True)])


def _verify_and_commit(
    params: ModelParams,
    state: SpecState,
    proposal: Proposal,
    *,
    target: ApplyFn,
    drafter: Drafter,
    rule: AcceptanceRule,
) -> tuple[SpecState, StepInfo]:
    """The round after the proposal: one target call, the verdict, and what follows from it."""
    cache = state.target_cache
    block = jnp.concatenate([state.last_token[:, None], proposal.tokens], axis=1)
    mask, depths = tree_block(proposal)
    options = {
        "positions": cache.length[:, None] + depths,
        "block_mask": mask,
        "hidden_layers": observed_layers(drafter),
    }
    if proposal.prefix is None:
        logits, hidden, cache = target(params.target, block, cache, **options)
    else:
        begun, first_layer = proposal.prefix.hidden, proposal.prefix.num_layers
        logits, hidden, cache = target(
            params.target, begun, cache, first_layer=first_layer, **options
        )
    processed = process_block(logits, state.settings, block, proposal.parents)
    settings = state.settings.without_processors()
    verdict, probs = judge(rule, processed, settings, proposal, state.seed, cache.length + 1)
    if verdict.path is not None:
        rows = jnp.arange(block.shape[0])[:, None]
        block, hidden, logits, probs = jax.tree.map(
            lambda leaf: leaf[rows, verdict.path], (block, hidden, logits, probs)
        )
    tokens = emitted_tokens(block[:, 1:], verdict)
    num_tokens, is_done = cut_at_end(state, tokens, verdict.num_accepted + 1)
    valid = jnp.arange(block.shape[1]) < num_tokens[:, None]
    last = jnp.take_along_axis(tokens, jnp.maximum(num_tokens - 1, 0)[:, None], axis=1)[:, 0]
    state = state.replace(
        target_cache=cache.commit(num_tokens, verdict.path),
        draft=drafter.observe(params.draft, state.draft, block, hidden, valid),
        last_token=jnp.where(state.is_done, state.last_token, last),
        settings=state.settings.after_all(block, valid),
    )
    counts = proposal.num_tokens, verdict.num_accepted
    kind = jnp.zeros_like(num_tokens) if proposal.kind is None else proposal.kind
    if state.control is not None:
        state = state.replace(
            control=state.control.update(kind, *counts, is_running=~state.is_done)
        )
    state = silence(state, is_done)
    logprobs = None if probs is None else token_logprobs(logits, probs, tokens)
    return state, StepInfo(tokens, num_tokens, *counts, kind, logprobs)


def _draft_keys(
    rule: AcceptanceRule, state: SpecState, width: int, is_random: Bool[Array, ""]
) -> Key[Array, "b w"]:
    """Returns the keys of the drafts; those of a batch without randomness are all the same."""

    def derive() -> Key[Array, "b w"]:
        return rule.noise.draft_keys(state.seed, state.target_cache.length + 1, width)

    def skip() -> Key[Array, "b w"]:
        return jnp.broadcast_to(jax.random.key(0, impl=KEY_TYPE), (state.seed.shape[0], width))

    return jax.lax.cond(is_random, derive, skip)


def _wanted(state: SpecState, drafter: Drafter, kind: RowCounts) -> RowCounts:
    """Returns how many drafts of each row are wanted at most; no more than it may still emit."""
    room = state.max_length - (state.target_cache.length + 1)
    wanted = jnp.clip(room - 1, 0, drafter.num_draft_tokens)
    if state.control is not None:
        lag = lag_of(drafter, state.draft, kind)
        wanted = jnp.minimum(wanted, state.control.choose(kind, lag, room))
    return jnp.where(state.is_done, 0, wanted)


def _end_at_no_token(proposal: Proposal) -> Proposal:
    """Leaves no draft from NO_TOKEN on."""
    num_real = jnp.sum(jnp.cumprod(proposal.tokens >= 0, axis=1, dtype=jnp.int32), axis=1)
    return proposal.replace(num_tokens=jnp.minimum(proposal.num_tokens, num_real))


def emitted_tokens(drafts: DraftTokens, verdict: Verdict) -> Int32[Array, "b w+1"]:
    """Returns the kept drafts [b w] and then the next token; what lies behind it means nothing."""
    index = jnp.arange(drafts.shape[1] + 1)
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    is_next = index == verdict.num_accepted[:, None]
    return jnp.where(is_next, verdict.next_token[:, None], padded)


def tree_block(proposal: Proposal) -> tuple[Bool[Array, "1 t t"], Int32[Array, "t"]]:
    """Returns which block tokens each one sees (its ancestors and itself), and its depth.

    Block token 0 is the last committed one; draft i is block token i + 1. A chain is the tree whose
    parents are -1, 0, 1, ...
    """
    parents = proposal.parents
    if parents is None:
        parents = tuple(range(-1, proposal.width - 1))
    sees = np.eye(len(parents) + 1, dtype=bool)
    for draft, parent in enumerate(parents):
        sees[draft + 1] |= sees[parent + 1]
    return jnp.asarray(sees)[None], jnp.asarray(sees.sum(axis=1) - 1, jnp.int32)

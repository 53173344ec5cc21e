"""One round of speculative decoding: propose, verify, accept, commit."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jspec.sampling import process_block
from jspec.speculation.ends import cut_at_end, silence
from jspec.speculation.logprobs import token_logprobs
from jspec.speculation.types import (
    AcceptanceRule,
    Drafter,
    ModelParams,
    Proposal,
    SpecState,
    StepInfo,
    TargetView,
    Verdict,
)
from jspec.typing import ApplyFn, DraftTokens


def speculative_step(
    params: ModelParams,
    state: SpecState,
    *,
    target: ApplyFn,
    drafter: Drafter,
    rule: AcceptanceRule,
) -> tuple[SpecState, StepInfo]:
    """Advances every row by one round, each by its own number of tokens.

    Args:
      params: both sides' parameters.
      state: before the round.
      target: the target's ApplyFn.
      drafter: what proposes.
      rule: what decides.

    Returns:
      The state after it, and what happened.
    """
    cache = state.target_cache
    proposal, draft = drafter.propose(
        params.draft,
        state.draft,
        state.last_token,
        rng_keys=rule.noise.draft_keys(state.seed, cache.length + 1, drafter.num_draft_tokens),
        settings=state.settings.after(state.last_token).replace(
            temperature=state.draft_temperature
        ),
        view=TargetView(params.target, target, cache),
    )
    proposal = _shorten(proposal, state)
    state = state.replace(draft=draft)
    verify = functools.partial(
        _verify_and_commit, params, target=target, drafter=drafter, rule=rule
    )
    if drafter.may_be_silent and proposal.width > 1:
        return _at_fitting_width(verify, state, proposal)
    return verify(state, proposal)


VerifyFn = Callable[[SpecState, Proposal], tuple[SpecState, StepInfo]]


def _at_fitting_width(
    verify: VerifyFn, state: SpecState, proposal: Proposal
) -> tuple[SpecState, StepInfo]:
    """Verifies at full width, or at width 1 where no row has more than one draft to verify.

    A drafter that has nothing to say then costs next to nothing. Two while loops of zero or one
    trips choose: a `lax.cond` would copy the caches that it carries.
    """
    is_narrow = (proposal.num_tokens <= 1).all()
    empty_info = jax.eval_shape(verify, state, proposal)[1]
    empty_info = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), empty_info)

    def run(is_wanted: Array, proposal: Proposal, state: SpecState, info: StepInfo) -> Any:
        def body(carry: tuple[Array, SpecState, StepInfo]) -> tuple[Array, SpecState, StepInfo]:
            _, state, _ = carry
            state, info = verify(state, proposal)
            return jnp.array(False), state, jax.tree.map(_pad_like, info, empty_info)

        return jax.lax.while_loop(lambda carry: carry[0], body, (is_wanted, state, info))[1:]

    state, info = run(is_narrow, proposal.narrow(1), state, empty_info)
    return run(~is_narrow, proposal, state, info)


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
    logits, hidden, cache = target(
        params.target, block, cache, positions=cache.length[:, None] + depths, block_mask=mask
    )
    processed = process_block(logits, state.settings, block, proposal.parents)
    probs = rule.law(processed, state.settings.without_processors())
    noise = rule.noise.acceptance(
        state.seed,
        cache.length + 1,
        proposal.width,
        probs.shape[-1],
        state.settings.is_random,
    )
    verdict = rule.accept(probs, proposal, noise)
    if verdict.path is not None:
        block = jnp.take_along_axis(block, verdict.path, axis=1)
        hidden, logits, probs = (
            jnp.take_along_axis(leaf, verdict.path[..., None], axis=1)
            for leaf in (hidden, logits, probs)
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
    state = silence(state, is_done)
    logprobs = None
    if state.settings.switches.logprobs:
        logprobs = token_logprobs(logits, probs, tokens)
    return state, StepInfo(tokens, num_tokens, proposal.num_tokens, verdict.num_accepted, logprobs)


def _shorten(proposal: Proposal, state: SpecState) -> Proposal:
    """Leaves no more drafts than the row may still emit, and none from NO_TOKEN on."""
    room = state.max_length - (state.target_cache.length + 1) - 1
    num_real = jnp.sum(jnp.cumprod(proposal.tokens >= 0, axis=1, dtype=jnp.int32), axis=1)
    num_tokens = jnp.minimum(proposal.num_tokens, num_real)
    num_tokens = jnp.clip(num_tokens, 0, jnp.maximum(room, 0))
    return proposal.replace(num_tokens=jnp.where(state.is_done, 0, num_tokens))


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

"""Times rounds beside a plain step, and what they consist of.

Every turn of a loop is the same round: behind 129 tokens, one token over and over, so that a
drafter that looks back finds a match, at temperature 0. What is written into the caches stays
there, and their lengths are set back. A drafter has read the text before.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.common.typing import ApplyFn, RowTokens, Tokens
from jspec.drafters import DrafterOptions, make_drafter
from jspec.evaluation.benchmarking.calls import call_loop
from jspec.evaluation.benchmarking.repeated import Loop
from jspec.evaluation.benchmarking.round_parts import choice_loop
from jspec.evaluation.benchmarking.turns import Turn, take_turns
from jspec.generation.calibration import PROMPT_TOKENS, catch_up, start_row
from jspec.generation.engine import Engine
from jspec.generation.programs import make_spec
from jspec.kernels import first_argmax
from jspec.models import KVCache, make_apply
from jspec.speculation.acceptance import get_rule
from jspec.speculation.acceptance.types import Proposal
from jspec.speculation.control import drafters_of
from jspec.speculation.plain import plain_step
from jspec.speculation.step import propose, speculative_step
from jspec.speculation.types import Drafter, ModelParams, SpecState
from jspec.weights.resolver import LoadedModel
from jspec.weights.vocabulary import mask_padding

_CAPACITY = 512
_RULE = "rejection"
PartFn = Callable[[ModelParams, SpecState], tuple[Any, SpecState]]
"""A part of a round: what it finds, a pytree with `tokens`, and the state after it."""


class RoundParts(NamedTuple):
    """Seconds of a round.

    Attributes:
      whole: all of it.
      drafting: the proposal, right before a call: what a call reads drives the drafter's weights
        out of the processor's caches, as it does in a round.
      call: the target's, with a greedy choice.
      choice: from the logits to the tokens of the round.
    """

    whole: float
    drafting: float
    call: float
    choice: float


def _to_parts(whole: float, proposal_and_call: float, call: float, choice: float) -> RoundParts:
    """Returns the parts; nothing is proposed where that takes no time."""
    drafting = proposal_and_call - call if proposal_and_call > 0 else 0.0
    return RoundParts(whole, drafting, call, choice)


class _Found(NamedTuple):
    """What a call finds behind a proposal.

    Attributes:
      tokens: the most likely ones, [b t].
      proposal: what was proposed.
    """

    tokens: Tokens
    proposal: Proposal


class RoundOf(NamedTuple):
    """Which round it is.

    Attributes:
      drafter: who drafts; of a cascade, the member.
      num_drafts: tokens that it proposes; 0 where it is asked for none.
      begins_call: whether the proposal is the beginning of the target's call, some of its layers,
        which then goes on from there; the call's own time says nothing of such a round.
    """

    drafter: str
    num_drafts: int
    begins_call: bool


def time_rounds(
    target: LoadedModel,
    draft: LoadedModel | None,
    drafter_name: str,
    options: DrafterOptions,
    num_drafts: int,
    repeats: int,
) -> Iterator[tuple[RoundOf, list[Turn[RoundParts]]]]:
    """Yields rounds of one row, without drafts and with so many, beside plain steps.

    Args:
      target: the target.
      draft: the draft model, for a drafter that has one.
      drafter_name: who drafts; not "none".
      options: that it reads.
      num_drafts: tokens that it proposes.
      repeats: measurements of each.
    """
    apply = mask_padding(make_apply(target.config), target)
    plain = _plain_loops(target, apply)
    built = make_drafter(drafter_name, make_spec(target, draft, drafter_name, options, num_drafts))
    assert built.drafter is not None
    params = ModelParams(target.params, built.params)
    engine = Engine(target, built.drafter, get_rule(_RULE), (0, num_drafts))
    for one, state in forced_states(engine, params, apply, built.drafter):
        own = _loops(params, state, apply, built.drafter, one.num_drafts)
        own |= _parts_beside(target, one.num_drafts)
        yield one, take_turns(own, plain, _to_parts, repeats)


def forced_states(
    engine: Engine, params: ModelParams, apply: ApplyFn, drafter: Drafter
) -> Iterator[tuple[RoundOf, SpecState]]:
    """Yields states in which one member of a drafter, and no other, is asked for drafts.

    First without drafts, then each member with as many as the drafter has.
    """
    most = drafter.num_draft_tokens
    members = drafters_of(drafter.kinds)
    for member, number in [(members[0], 0), *((member, most) for member in members)]:
        state = start_row(engine, params, _CAPACITY, most)
        state = catch_up(params, state, apply, drafter, member)
        assert state.control is not None  # the engine has numbers to choose from
        wanted = [number * (kind.drafter == member) for kind in drafter.kinds]
        control = state.control.replace(forced=jnp.array([wanted], jnp.int32))
        state = state.replace(control=control)
        half = functools.partial(propose, target=apply, drafter=drafter, rule=get_rule(_RULE))
        proposal, _ = jax.eval_shape(half, params, state)
        yield RoundOf(member, number, proposal.prefix is not None), state


def _plain_loops(target: LoadedModel, apply: ApplyFn) -> dict[str, Loop]:
    """Returns loops over a plain step and its parts."""
    params = ModelParams(target.params, None)
    state = start_row(Engine(target, None, get_rule(_RULE)), params, _CAPACITY, 1)
    step = functools.partial(plain_step, target=apply)
    return {"whole": state_loop(params, state, _turned(step))} | _parts_beside(target, 0)


def _loops(
    params: ModelParams, state: SpecState, apply: ApplyFn, drafter: Drafter, num_drafts: int
) -> dict[str, Loop]:
    """Returns loops over a round, and over a proposal with a call on it."""
    sides = {"target": apply, "drafter": drafter, "rule": get_rule(_RULE)}
    widths = (0, drafter.num_draft_tokens)
    step = functools.partial(speculative_step, widths=widths, **sides)

    def propose_and_call(params: ModelParams, state: SpecState) -> tuple[_Found, SpecState]:
        proposal, after = propose(params, state, **sides)
        block = jnp.concatenate([state.last_token[:, None], proposal.tokens[:, :num_drafts]], 1)
        logits, _, cache = apply(params.target, block, after.target_cache)
        return _Found(first_argmax(logits)[0], proposal), after.replace(target_cache=cache)

    return {
        "whole": state_loop(params, state, _turned(step)),
        "proposal_and_call": state_loop(params, state, propose_and_call),
    }


def _parts_beside(target: LoadedModel, num_drafts: int) -> dict[str, Loop]:
    """Returns loops over the target's call and the choice."""
    return {
        "call": call_loop(target, num_drafts + 1, context=PROMPT_TOKENS),
        "choice": choice_loop(target.config.vocab_size, num_drafts, temperature=0.0),
    }


def _turned(step: Callable[[ModelParams, SpecState], tuple[SpecState, Any]]) -> PartFn:
    def turned(params: ModelParams, state: SpecState) -> tuple[Any, SpecState]:
        after, found = step(params, state)
        return found, after

    return turned


def state_loop(params: ModelParams, state: SpecState, do: PartFn) -> Loop:
    """Returns a compiled loop over a number of times a part of a round, from one state.

    Args:
      params: both sides' parameters.
      state: at the beginning of every turn; it is left alone, its caches are copied once.
      do: the part; everything that it finds has to be there before the next turn.
    """
    leaves, tree = jax.tree.flatten(state, is_leaf=_is_cache)
    others = [None if _is_cache(leaf) else jnp.copy(leaf) for leaf in leaves]
    caches = jax.tree.map(jnp.copy, _caches_of(state))

    @functools.partial(jax.jit, donate_argnums=1)
    def run(
        params: ModelParams, caches: list[KVCache], others: list[Any], num_turns: jax.Array
    ) -> tuple[list[KVCache], RowTokens]:
        def body(_: jax.Array, carry: tuple[list[KVCache], RowTokens]) -> Any:
            caches, token = carry
            own = iter(caches)
            state = tree.unflatten([next(own) if leaf is None else leaf for leaf in others])
            found, after = do(params, state.replace(last_token=token))
            found = jax.lax.optimization_barrier(found)
            is_there = found.tokens.min(axis=1) > -2  # always
            lengths = [cache.length for cache in caches]
            back = [new.rollback(old) for new, old in zip(_caches_of(after), lengths, strict=True)]
            return back, jnp.where(is_there, token, 0)

        return jax.lax.fori_loop(0, num_turns, body, (caches, state.last_token))

    def loop(num_turns: jax.Array) -> jax.Array:
        nonlocal caches
        caches, token = run(params, caches, others, num_turns)
        return token

    return loop


def _caches_of(state: SpecState) -> list[KVCache]:
    return list(filter(_is_cache, jax.tree.leaves(state, is_leaf=_is_cache)))


def _is_cache(leaf: Any) -> bool:
    return isinstance(leaf, KVCache)

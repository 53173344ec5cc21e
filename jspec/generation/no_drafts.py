"""Why "auto" made no drafts for an answer: what they were expected to cost, and to give."""

import jax.numpy as jnp
import numpy as np

from jspec.generation.costs import RoundCosts
from jspec.generation.result import Result
from jspec.speculation.control import FREE_STEPS, Control, drafters_of
from jspec.speculation.types import Drafter

_NUM_MOMENTS = 8  # of the answer, for which a row's choice is computed again
_MOST_TRIED = 1 + FREE_STEPS  # plain steps of a first round that is tried; see `Control`


def explain_no_drafts(
    result: Result, drafter: Drafter, costs: RoundCosts, context: int
) -> str | None:
    """Returns one line that says, of each drafter, why no round of an answer had drafts.

    What `Control` expects is computed for a few moments of the answer, as for a row that has not
    drafted; of each drafter the moment and the number of drafts count that promise the most.

    Args:
      result: the answer.
      drafter: the engine's, which chose among numbers of drafts.
      costs: those of its rounds.
      context: the cache slots of the answer's row.

    Returns:
      None if a round had drafts, if there was no round, or if the costs do not explain it.
    """
    if not result.stats.rounds or result.stats.num_proposed:
        return None
    control = _rows_at_moments(result, drafter, costs, context)
    num_read = len(result.prompt_token_ids)
    most = min(result.settings.max_new_tokens, context - num_read)
    room = jnp.maximum(most - control.num_emitted, 1)
    reasons = []
    for name in drafters_of(drafter.kinds):
        options = []
        for index, member in enumerate(drafter.kinds):
            if member.drafter == name:
                kind, lag = jnp.full_like(room, index), jnp.full_like(room, num_read)
                seconds = control.seconds_per_token(control.costs, kind, lag, room)
                slowdown = np.asarray(seconds / seconds[:, :1])[:, 1:].min(axis=0)
                tokens = np.asarray(control.expected_tokens(kind, is_proven=False))[0, 1:]
                options += zip(slowdown, costs.numbers[1:], tokens, strict=True)
        always_drafts = any(kind.is_certain for kind in drafter.kinds if kind.drafter == name)
        reasons.append(_reason(name, costs, context, *min(options), always_drafts=always_drafts))
    known = [reason for reason in reasons if reason is not None]
    return f"no drafts: {'; '.join(known)}" if known else None


def _reason(
    name: str,
    costs: RoundCosts,
    context: int,
    slowdown: float,
    number: int,
    tokens: float,
    *,
    always_drafts: bool,
) -> str | None:
    place = costs.drafters.index(name)
    seconds = costs.at(context)[place]
    steps = seconds[costs.numbers.index(number)] / seconds[0]
    unit = "draft" if number == 1 else "drafts"
    a_round = f"with {number} {unit} by {name} a round costs {steps:.2f} plain steps"
    if slowdown > 1:
        has_reading = costs.reading_at(context)[place] > 0
        reading = ", the reading of the prompt included" if has_reading else ""
        return (
            f"{a_round} and gives about {tokens:.2f} tokens, {slowdown:.2f} times as slow as plain "
            f"decoding{reading}"
        )
    if not always_drafts:
        return f"{name} found none"
    return f"{a_round}, too many to try" if steps > _MOST_TRIED else None


def _rows_at_moments(result: Result, drafter: Drafter, costs: RoundCosts, context: int) -> Control:
    """Returns a control whose rows are the answer's at some moments, from its first round on."""
    control = Control.init(_NUM_MOMENTS, kinds=drafter.kinds, numbers=costs.numbers)
    last = max(len(result.token_ids) - 1, 1)
    emitted = jnp.asarray(np.linspace(1, last, _NUM_MOMENTS).round(), jnp.int32)
    control = control.replace(
        costs=jnp.broadcast_to(costs.at(context), control.costs.shape),
        reading=jnp.broadcast_to(costs.reading_at(context), control.reading.shape),
        num_emitted=emitted,
        num_undrafted=emitted,
        owed=jnp.full_like(control.owed, -1e6),  # so that what is assumed of drafts counts
    )
    if not costs.decided:
        return control
    accepted, decided = np.array([costs.accepted, costs.decided], np.float32)
    return control.with_measured(accepted, decided, costs.answer_tokens)

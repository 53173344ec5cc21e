"""Measures what a round costs, by context, drafter and number of drafts.

The compiled rounds of the run themselves are timed, from a state in which every drafter has
something to say: the text is one token over and over. A visit of one round less a visit of none is
the round; the numbers take turns, so that a machine that slows down slows all of them alike.
"""

import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec.costs import RoundCosts
from jspec.engine import Engine, Row
from jspec.request import Settings
from jspec.sampling import Switches
from jspec.speculation.control import Kind, drafters_of
from jspec.speculation.types import ModelParams, SpecState

_CONTEXTS = (512, 2048)
_PROMPT_TOKENS = 48
_REPEATS = 9
_TOKEN_ID = 1


def measure_costs(
    engine: Engine,
    params: ModelParams,
    *,
    kinds: Sequence[Kind],
    numbers: Sequence[int],
    batch_size: int,
    max_context: int,
) -> RoundCosts:
    """Measures rounds of a whole batch, at temperature 0.

    Args:
      engine: the compiled programs; their rows choose among `numbers`.
      params: both sides' parameters.
      kinds: the drafter's.
      numbers: of drafts, rising from 0.
      batch_size: rows that run together.
      max_context: slots of the largest cache that will be used.
    """
    contexts = sorted({min(context, max_context) for context in _CONTEXTS})
    seconds = []
    for context in contexts:
        state = _warm_state(engine, params, batch_size, context, numbers[-1])
        seconds.append(_time_rounds(engine, params, state, kinds, numbers))
    return RoundCosts(tuple(contexts), tuple(numbers), tuple(drafters_of(kinds)), tuple(seconds))


def _warm_state(
    engine: Engine, params: ModelParams, batch_size: int, context: int, width: int
) -> SpecState:
    """Returns rows in the middle of an answer; a draft model has consumed their prompt."""
    room = context - width - 1
    prompt = [_TOKEN_ID] * min(_PROMPT_TOKENS, room - 2 * width - 4)
    row = Row(Settings(), prompt, stop_ids=(), max_length=room)
    one = engine.prefill(params, row, context, Switches())
    one, _ = engine.run(params, one, 1)
    one = one.replace(last_token=jnp.full_like(one.last_token, _TOKEN_ID))
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, batch_size, axis=0), one)


def _time_rounds(
    engine: Engine,
    params: ModelParams,
    state: SpecState,
    kinds: Sequence[Kind],
    numbers: Sequence[int],
) -> tuple[tuple[float, ...], ...]:
    """Returns the median seconds of a round, [drafters][numbers]."""
    drafters = drafters_of(kinds)
    settings = [(drafter, number) for drafter in drafters for number in numbers]
    samples: dict[tuple[str, int], list[float]] = {setting: [] for setting in settings}
    for repeat in range(_REPEATS + 1):
        for drafter, number in settings:
            forced = [number if kind.drafter == drafter else 0 for kind in kinds]
            visits = [_time_visit(engine, params, state, forced, rounds) for rounds in (0, 1)]
            if repeat > 0:  # the first one may compile
                samples[drafter, number].append(visits[1] - visits[0])
    return tuple(
        tuple(max(statistics.median(samples[drafter, number]), 1e-6) for number in numbers)
        for drafter in drafters
    )


def _time_visit(
    engine: Engine, params: ModelParams, state: SpecState, forced: Sequence[int], num_rounds: int
) -> float:
    """Returns the seconds of one visit to a copy of the state: a run takes its own."""
    state = jax.tree.map(jnp.copy, state)
    assert state.control is not None
    rows = jnp.asarray(np.broadcast_to(np.array(forced, np.int32), state.control.forced.shape))
    state = state.replace(control=state.control.replace(forced=rows))
    jax.block_until_ready(state)
    begin = time.perf_counter()
    state, _ = engine.run(params, state, num_rounds)
    jax.block_until_ready(state)
    return time.perf_counter() - begin

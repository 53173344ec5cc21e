"""Measures what a round costs, by context, drafter and number of drafts.

The compiled rounds of the run itself are timed, at temperature 0, where no distributions are made.
The text of the rows is one token over and over, so that a drafter that looks back always finds a
match, and one that learns from the target has learned the same; draft models have consumed it. A
round is the time of a visit of one round minus that of a visit of none. The numbers of drafts take
turns, and each is compared with the plain round of its turn, so that a machine that slows down for
a while slows both alike. A drafter that proposes nothing for such a text (`pattern`), or stops by
itself (`draft_confidence`), is taken to cost what it then costs. The cost of catching up is a round
of a drafter that lags minus the same round of one that does not.
"""

import statistics
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec.common.progress import Progress
from jspec.common.timing import timed
from jspec.generation.costs import RoundCosts
from jspec.generation.engine import Engine
from jspec.generation.request import Settings
from jspec.generation.rows import Row
from jspec.sampling.noise import INDEPENDENT
from jspec.sampling.settings import Switches
from jspec.speculation.kinds import drafters_of
from jspec.speculation.runners_up import show_runners_up
from jspec.speculation.types import (
    Drafter,
    ModelParams,
    RoundInputs,
    SpecState,
    TargetView,
    lag_of,
)

_CONTEXTS = (512, 2048)
PROMPT_TOKENS = 129
_REPEATS = 9
_READING_REPEATS = 5
_TOKEN_ID = 1


def measure_costs(
    engine: Engine,
    params: ModelParams,
    batch_size: int,
    max_seq_len: int,
    on_start: Callable[[int], Progress] | None = None,
) -> RoundCosts:
    """Measures rounds of a whole batch, whose longest row has at most `max_seq_len` tokens.

    The rows of the engine choose among numbers of drafts. `on_start` is called with the number of
    timings; it returns what shows how many are done.
    """
    drafter = engine.drafter
    assert drafter is not None
    drafters = drafters_of(drafter.kinds)
    largest = engine.capacity_for(max_seq_len)
    contexts = sorted({min(context, largest) for context in _CONTEXTS})
    seconds, reading = [], []
    num_each = (_REPEATS + 1) * len(drafters) * len(engine.numbers)
    progress = None if on_start is None else on_start(len(contexts) * num_each)
    for place, context in enumerate(contexts):
        one = lagging = _start_row(engine, params, context)
        for name in drafters:
            one = _catch_up(engine, params, one, drafter, name)
        ready, lagging = (
            jax.tree.map(lambda leaf: jnp.repeat(leaf, batch_size, axis=0), row)
            for row in (one, lagging)
        )
        seconds.append(_time_rounds(engine, params, ready, drafter, progress, place * num_each))
        reading.append(_time_reading(engine, params, ready, lagging, drafter))
    return RoundCosts(
        tuple(contexts), engine.numbers, tuple(drafters), tuple(seconds), tuple(reading)
    )


def _start_row(engine: Engine, params: ModelParams, context: int) -> SpecState:
    """Returns a row in the middle of its text."""
    width = engine.num_draft_tokens
    room = context - width - 1
    prompt = [_TOKEN_ID] * min(PROMPT_TOKENS, room - 2 * width - 4)
    row = Row(Settings(), prompt, stop_ids=(), max_length=room)
    one = engine.prefill(params, row, context, Switches())
    last = jnp.full_like(one.last_token, _TOKEN_ID)
    # A drafter that learns from the target has learned that this token follows itself.
    block, logits = last[:, None], jax.nn.one_hot(last[:, None], _TOKEN_ID + 1)
    is_fed = jnp.ones_like(block, bool)
    draft = show_runners_up(engine.drafter, one.draft, block, logits, is_fed, is_fed)
    return one.replace(last_token=last, draft=draft)


def _catch_up(
    engine: Engine, params: ModelParams, state: SpecState, drafter: Drafter, name: str
) -> SpecState:
    """Returns the row after one drafter of a cascade has caught up by a proposal, now dropped."""
    width = drafter.num_draft_tokens
    is_own = jnp.array([kind.drafter == name for kind in drafter.kinds])

    def propose(params: ModelParams, state: SpecState) -> SpecState:
        inputs = RoundInputs(
            state.last_token,
            limit=lambda kind: jnp.where(is_own[kind], width, 0),
            rng_keys=INDEPENDENT.draft_keys(state.seed, state.target_cache.length, width),
            settings=state.settings.after(state.last_token),
            view=TargetView(params.target, engine.apply, state.target_cache),
        )
        return state.replace(draft=drafter.propose(params.draft, state.draft, inputs)[1])

    return jax.jit(engine.layout.spread(propose))(params, state)


def _time_rounds(
    engine: Engine,
    params: ModelParams,
    state: SpecState,
    drafter: Drafter,
    progress: Progress | None,
    num_before: int,
) -> tuple[tuple[float, ...], ...]:
    """Returns the usual seconds of a round, [drafters][numbers]; more drafts never cost less."""
    drafters, numbers = drafters_of(drafter.kinds), engine.numbers
    samples = np.zeros([_REPEATS + 1, len(drafters), len(numbers)])
    for count, (repeat, row, column) in enumerate(np.ndindex(samples.shape), 1 + num_before):
        wanted = [numbers[column] * (kind.drafter == drafters[row]) for kind in drafter.kinds]
        none, one = (_time_visit(engine, params, state, wanted, rounds) for rounds in (0, 1))
        samples[repeat, row, column] = one - none
        if progress is not None:
            progress.show(count)
    samples = samples[1:]  # the first one may compile
    plain = np.maximum(samples[:, :, :1], 1e-6)
    # Medians of seconds would not do: under other work, which comes and goes, that of plain rounds
    # may fall on a slow turn and that of drafts on a fast one.
    times_plain = np.median(samples / plain, axis=0)
    times_plain = np.maximum.accumulate(np.maximum(times_plain, 1.0), axis=1)
    return tuple(map(tuple, (np.median(plain) * times_plain).tolist()))


def _time_reading(
    engine: Engine, params: ModelParams, ready: SpecState, lagging: SpecState, drafter: Drafter
) -> tuple[float, ...]:
    """Returns the median seconds for each token that a drafter has missed, [drafters]."""
    kinds, reading = [kind.drafter for kind in drafter.kinds], []
    for name in drafters_of(drafter.kinds):
        kind = jnp.full_like(lagging.last_token, kinds.index(name))
        lag = int(lag_of(drafter, lagging.draft, kind)[0])
        wanted = [engine.numbers[1] * (one == name) for one in kinds]
        more = [0.0]
        if lag > 0:
            more = [
                _time_visit(engine, params, lagging, wanted, 1)
                - _time_visit(engine, params, ready, wanted, 1)
                for _ in range(_READING_REPEATS)
            ]
        reading.append(max(statistics.median(more), 0.0) / max(lag, 1))
    return tuple(reading)


def _time_visit(
    engine: Engine, params: ModelParams, state: SpecState, forced: Sequence[int], num_rounds: int
) -> float:
    """Returns the seconds of one visit to a copy of the state: a run gives its state away."""
    state = jax.tree.map(jnp.copy, state)
    assert state.control is not None
    rows = jnp.asarray(np.broadcast_to(np.array(forced, np.int32), state.control.forced.shape))
    state = state.replace(control=state.control.replace(forced=rows))
    jax.block_until_ready(state)
    return timed(lambda: engine.run(params, state, num_rounds))[0]

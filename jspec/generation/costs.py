"""What rounds cost on this machine, by context, drafter and number of drafts: measured.

The compiled rounds of the run itself are timed at temperature 0, a server's in its own rows and
pages. The text of the rows is one token over and over, so
that a drafter that looks back always finds a match, and one that learns from the target has learned
the same; draft models have consumed it. For a draft model of another vocabulary it is an English
text over and over, as what it reads and drafts depends on it.

A round is the time of a visit of one round minus that of a visit of none. The numbers of drafts
take turns, and each is compared with the plain round of its turn, so that a machine that slows down
for a while slows both alike. A drafter that proposes nothing for such a text (`pattern`), or stops
by itself (`draft_confidence`), is taken to cost what it then costs. The cost of catching up is a
round of a drafter that lags minus the same round of one that does not, of an English text: packed
weights read one token over and over in two thirds of the time.

With "auto" a row decides in its first rounds, before any draft of its own was accepted or refused.
What it assumes then is measured, too, unless several processes share the machine: a few prompts of
several kinds are answered at temperature 0, with as many drafts in each round as there may be.
"""

import dataclasses
import itertools
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jspec.common import processes
from jspec.common.errors import InputError
from jspec.common.progress import Progress
from jspec.generation.batch import Batch
from jspec.generation.engine import MAX_ROUNDS_PER_VISIT, CompileNotice, Engine
from jspec.generation.prompts import encode_text, read_prompt
from jspec.generation.request import Request, SamplingParams
from jspec.generation.result import RoundCounts
from jspec.generation.rows import Row, make_row
from jspec.sampling.noise import INDEPENDENT
from jspec.sampling.settings import Switches
from jspec.speculation.control import drafters_of
from jspec.speculation.types import Drafter, ModelParams, RoundInputs, SpecState, TargetView
from jspec.weights import TokenizerLike
from jspec.weights.resolver import LoadedModel


@dataclasses.dataclass(frozen=True)
class RoundCosts:
    """Seconds that rounds take, by context, drafter and number of drafts.

    Attributes:
      contexts: numbers of cache slots for which they were measured, in increasing order; a server's
        pages have one, for texts of all lengths.
      numbers: numbers of drafts.
      drafters: names of the drafters.
      seconds: seconds of a round, drafts and verify call, by context, drafter and number.
      reading: seconds per token that a drafter has not read yet and reads before it drafts, such as
        those of the prompt, by context and drafter; empty if no drafter reads anything.
      accepted: first and later drafts accepted in a few answers, by kind of proposal; empty where
        that was not measured.
      decided: likewise those that were accepted or refused.
      answer_tokens: mean length of these answers; 0 where that was not measured.
    """

    contexts: tuple[int, ...]
    numbers: tuple[int, ...]
    drafters: tuple[str, ...]
    seconds: tuple[tuple[tuple[float, ...], ...], ...]
    reading: tuple[tuple[float, ...], ...] = ()
    accepted: tuple[tuple[float, ...], ...] = ()
    decided: tuple[tuple[float, ...], ...] = ()
    answer_tokens: int = 0

    def __post_init__(self) -> None:
        shape = len(self.contexts), len(self.drafters), len(self.numbers)
        _check_shape("costs", self.seconds, shape)
        if self.reading:
            _check_shape("seconds of reading", self.reading, shape[:2])
        if list(self.contexts) != sorted(set(self.contexts)):
            raise InputError(f"expected costs of rising contexts, got {list(self.contexts)}")
        if not all(0 < x < math.inf for x in np.ravel(self.seconds)):
            raise InputError("expected costs that are finite numbers of seconds above 0")
        if not all(0 <= x < math.inf for x in np.ravel(self.reading)):
            raise InputError("expected seconds of reading that are finite and not below 0")
        if self.accepted or self.decided:
            _check_shape("accepted drafts", self.accepted, (len(self.accepted), 2))
            _check_shape("decided drafts", self.decided, (len(self.accepted), 2))
            pairs = zip(np.ravel(self.accepted), np.ravel(self.decided), strict=True)
            if not all(0 <= accepted <= decided < math.inf for accepted, decided in pairs):
                raise InputError("expected accepted drafts from 0 to the number decided")
        if self.answer_tokens < 0:
            raise InputError(f"expected answer_tokens of at least 0, got {self.answer_tokens}")

    def at(self, context: int) -> np.ndarray:
        """Returns the seconds of a round with this many slots, [drafters numbers].

        Linear between the measured contexts and beyond the last; constant below the first.
        """
        return self._at(context, np.asarray(self.seconds, np.float64))

    def reading_at(self, context: int) -> np.ndarray:
        """Returns the seconds per unread token with this many slots, [drafters]."""
        if not self.reading:
            return np.zeros([len(self.drafters)], np.float32)
        return self._at(context, np.asarray(self.reading, np.float64))

    def _at(self, context: int, seconds: np.ndarray) -> np.ndarray:
        if len(self.contexts) == 1 or context <= self.contexts[0]:
            return seconds[0].astype(np.float32)
        last = int(np.searchsorted(self.contexts[1:-1], context)) + 1
        low, high = self.contexts[last - 1], self.contexts[last]
        share = (context - low) / (high - low)
        at = (1 - share) * seconds[last - 1] + share * seconds[last]
        return np.maximum(at, seconds[last - 1].min()).astype(np.float32)

    def followed_by(self, longer: Self) -> Self:
        """Returns them with those of larger contexts, measured for the same drafters."""
        return dataclasses.replace(
            self,
            contexts=self.contexts + longer.contexts,
            seconds=self.seconds + longer.seconds,
            reading=self.reading + longer.reading,
        )

    def plain_steps(self, rounds: Sequence[RoundCounts], context: int) -> float | None:
        """Returns what these rounds cost on average, in plain steps with this many slots.

        A round costs what the next larger measured number of its drafter's drafts does. None where
        there are no rounds, or drafts of a drafter that was not measured.
        """
        names = {a_round.drafter for a_round in rounds if a_round.num_proposed}
        if not rounds or not names <= set(self.drafters):
            return None
        seconds, most = self.at(context), len(self.numbers) - 1
        total = 0.0
        for a_round in rounds:
            row = self.drafters.index(a_round.drafter) if a_round.num_proposed else 0
            column = min(int(np.searchsorted(self.numbers, a_round.num_proposed)), most)
            total += float(seconds[row, column] / seconds[row, 0])
        return total / len(rounds)

    def to_json(self) -> dict[str, Any]:
        """Returns the costs as plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, record: Any) -> Self:
        """Returns the costs in a record of `to_json`.

        Raises:
          InputError: if the record is anything else.
        """
        try:
            return cls(
                contexts=tuple(map(int, record["contexts"])),
                numbers=tuple(map(int, record["numbers"])),
                drafters=tuple(map(str, record["drafters"])),
                seconds=tuple(tuple(tuple(map(float, c)) for c in b) for b in record["seconds"]),
                **{
                    name: tuple(tuple(map(float, row)) for row in record.get(name, ()))
                    for name in ("reading", "accepted", "decided")
                },
                answer_tokens=int(record.get("answer_tokens", 0)),
            )
        except InputError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            raise InputError(
                "expected costs of rounds, an object of contexts, numbers, drafters, seconds and "
                "reading as in settings.costs of an answer; got something else"
            ) from None


def _check_shape(name: str, values: Any, expected: tuple[int, ...]) -> None:
    try:
        shape = np.asarray(values, float).shape
    except (TypeError, ValueError):
        shape = "rows of different lengths"
    if shape != expected or 0 in expected:
        raise InputError(f"expected {name} of shape {expected}, got {shape}")


def read_costs(path: str) -> RoundCosts:
    """Returns the costs in a JSON file written from `RoundCosts.to_json`.

    Raises:
      InputError: if the file cannot be read or holds anything else.
    """
    try:
        return RoundCosts.from_json(json.loads(pathlib.Path(path).read_bytes()))
    except OSError as error:
        raise InputError(f"cannot read the costs in {path}: {error.strerror}") from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        reason = f"expected costs of rounds, a JSON object, got broken JSON ({error})"
        raise InputError(f"{path}: {reason}") from None


_Change: TypeAlias = Callable[[ModelParams, SpecState], SpecState]
_CONTEXTS = (512, 2048)
PROMPT_TOKENS = 129
LONGEST_MEASURED = 448  # tokens of prompt and answer of a row, at most, in all that is measured
_REPEATS = 9
_READING_REPEATS = 5
_TOKEN_ID = 1
_MAX_NEW_TOKENS = 96
_PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Why is the sky blue? Explain it to a child in a few sentences.",
    "Correct the spelling and repeat the whole text: The quik brown fox jumps over the lasy dog. "
    "The dog dos not mind, becaus it sleeps. The fox runs back over the lasy dog once more.",
    "A train leaves at 9:40 and arrives at 12:05 after a stop of 15 minutes. How long did it move? "
    "Think step by step.",
)
_TEXT = (
    "The committee met on Tuesday to discuss the budget for the coming year. Three members wanted "
    "to spend more on schools, while the others asked for new roads and a larger library. "
)


class MeasuredTexts(NamedTuple):
    """The token ids that rows repeat while rounds are timed, and while drafters read."""

    rounds: Sequence[int] = (_TOKEN_ID,)
    reading: Sequence[int] = (_TOKEN_ID,)


def contexts_of(engine: Engine, max_seq_len: int) -> tuple[int, ...]:
    """Returns the numbers of slots to measure for texts of at most `max_seq_len` tokens, rising."""
    largest = engine.capacity_for(max_seq_len)
    return tuple(sorted({min(context, largest) for context in _CONTEXTS}))


def make_batch(engine: Engine, params: ModelParams, num_rows: int, context: int) -> Batch:
    """Returns rows with this many slots, such as greedy requests have."""
    sizes = num_rows, context - engine.num_draft_tokens - 1
    return Batch(engine, params, CompileNotice(None), *sizes, Switches())


def measure_costs(
    batch: Batch,
    context: int,
    num_rows: int,
    on_start: Callable[[int], Progress] | None = None,
    texts: MeasuredTexts = MeasuredTexts(),  # noqa: B008
) -> RoundCosts:
    """Measures rounds of the first rows of a batch of that context; it is empty afterwards.

    Its rows choose among numbers of drafts. `on_start` is called with the number of timings; it
    returns what shows how many are done. The rows repeat `texts`; see `texts_for`.
    """
    drafter, numbers = batch.engine.drafter, batch.engine.numbers
    assert drafter is not None
    drafters, catch_up = drafters_of(drafter.kinds), _catch_up(batch.engine)
    num_timings = (_REPEATS + 1) * len(drafters) * len(numbers)
    progress = None if on_start is None else on_start(num_timings)
    states = _start(batch, num_rows, texts.rounds, catch_up)
    seconds = _time_rounds(batch, states[1], progress)
    if drafter.has_lag and texts.reading != texts.rounds:
        states = _start(batch, num_rows, texts.reading, catch_up)
    reading = _time_reading(batch, *states)
    for row in range(num_rows):
        batch.finish(row)
    return RoundCosts((context,), numbers, tuple(drafters), (seconds,), (reading,))


def texts_for(drafter: Drafter | None, tokenizer: TokenizerLike) -> MeasuredTexts:
    """Returns what rows repeat where a drafter's rounds, and its reading, are measured."""
    english = tokenizer.encode(_TEXT, add_bos=False)
    reads_text = drafter is not None and drafter.reads_text
    return MeasuredTexts(english if reads_text else (_TOKEN_ID,), english)


def _start(
    batch: Batch, num_rows: int, text: Sequence[int], catch_up: _Change
) -> tuple[SpecState, SpecState]:
    """Returns rows in the middle of their text: with drafters that lag, and with none that does."""
    engine = batch.engine
    assert engine.drafter is not None
    width = engine.num_draft_tokens
    length = min(PROMPT_TOKENS, batch.max_length - 2 * width - 4)
    *prompt, newest, following = itertools.islice(itertools.cycle(text), length + 2)
    row = Row(SamplingParams(), prompt, stop_ids=(), max_length=length + 2 * width + 4)
    for number in range(num_rows):
        batch.fill(number, row)
    state = batch.state
    last_token = jnp.full_like(state.last_token, newest)
    # A drafter that learns from the target has learned what follows this token: itself, usually.
    block = last_token[:, None]
    logits = jax.nn.one_hot(jnp.full_like(block, following), max(text) + 1)
    is_fed = jnp.ones_like(block, bool)

    def learn(params: ModelParams, state: SpecState) -> SpecState:
        del params
        assert engine.drafter is not None
        draft = engine.drafter.observe_logits(state.draft, block, logits, is_fed, is_fed)
        return state.replace(last_token=last_token, draft=draft)

    batch.change(learn)
    lagging = jax.tree.map(jnp.copy, batch.state)
    if engine.drafter.has_lag:
        batch.change(catch_up)
    return lagging, batch.state


def _catch_up(engine: Engine) -> _Change:
    """Returns what has each drafter of a cascade catch up by a proposal, which is dropped."""
    drafter = engine.drafter
    assert drafter is not None
    width, kinds = drafter.num_draft_tokens, [kind.drafter for kind in drafter.kinds]

    def propose(params: ModelParams, state: SpecState, is_asked: Bool[Array, "k"]) -> SpecState:
        inputs = RoundInputs(
            state.last_token,
            limit=lambda kind: jnp.where(is_asked[kind], width, 0),
            rng_keys=INDEPENDENT.draft_keys(state.seed, state.target_cache.length, width),
            settings=state.settings.after(state.last_token),
            view=TargetView(params.target, engine.apply, state.target_cache),
        )
        return state.replace(draft=drafter.propose(params.draft, state.draft, inputs)[1])

    def catch_up(params: ModelParams, state: SpecState) -> SpecState:
        for name in drafters_of(drafter.kinds):
            is_asked = np.array([kind == name for kind in kinds])
            state = program(params, state, is_asked)
        return state

    program = jax.jit(engine.layout.spread(propose), donate_argnums=1)
    return catch_up


def _time_rounds(
    batch: Batch, state: SpecState, progress: Progress | None
) -> tuple[tuple[float, ...], ...]:
    """Returns the usual seconds of a round, [drafters][numbers]; more drafts never cost less."""
    drafter, numbers = batch.engine.drafter, batch.engine.numbers
    assert drafter is not None
    drafters = drafters_of(drafter.kinds)
    samples = np.zeros([_REPEATS + 1, len(drafters), len(numbers)])
    for count, (repeat, row, column) in enumerate(np.ndindex(samples.shape), 1):
        wanted = [numbers[column] * (kind.drafter == drafters[row]) for kind in drafter.kinds]
        overhead, total = (_time_visit(batch, state, wanted, rounds) for rounds in (0, 1))
        samples[repeat, row, column] = total - overhead
        if progress is not None:
            progress.show(count)
    samples = samples[1:]  # the first one may compile
    plain = np.maximum(samples[:, :, :1], 1e-6)
    # Medians of seconds would not do: under other work, which comes and goes, that of plain rounds
    # may fall on a slow turn and that of drafts on a fast turn.
    times_plain = np.median(samples / plain, axis=0)
    times_plain = np.maximum.accumulate(np.maximum(times_plain, 1.0), axis=1)
    return tuple(map(tuple, (np.median(plain) * times_plain).tolist()))


def _time_reading(batch: Batch, lagging: SpecState, ready: SpecState) -> tuple[float, ...]:
    """Returns the median seconds for each token that a drafter has missed, [drafters]."""
    drafter, numbers = batch.engine.drafter, batch.engine.numbers
    assert drafter is not None
    kinds, reading = [kind.drafter for kind in drafter.kinds], []
    for name in drafters_of(drafter.kinds):
        kind = jnp.full_like(lagging.last_token, kinds.index(name))
        lag = int(drafter.lag(lagging.draft, kind)[0])
        wanted = [numbers[1] * (drafter_name == name) for drafter_name in kinds]
        more = [0.0]
        if lag > 0:
            more = [
                _time_visit(batch, lagging, wanted, 1) - _time_visit(batch, ready, wanted, 1)
                for _ in range(_READING_REPEATS)
            ]
        reading.append(max(statistics.median(more), 0.0) / max(lag, 1))
    return tuple(reading)


def _time_visit(batch: Batch, state: SpecState, forced: Sequence[int], num_rounds: int) -> float:
    """Returns the seconds of one visit to a copy of the state: a run gives its state away."""
    batch.state = state  # what the last visit has left goes, before there is a copy
    state = jax.tree.map(jnp.copy, state)
    assert state.control is not None
    rows = jnp.asarray(np.broadcast_to(np.array(forced, np.int32), state.control.forced.shape))
    state = state.replace(control=state.control.replace(forced=rows))
    batch.state = jax.block_until_ready(state)
    return batch.run(num_rounds)


class AcceptanceRates(NamedTuple):
    """What was measured.

    Attributes:
      accepted: for each kind of proposal the number of first and of later drafts accepted.
      decided: likewise of those that were accepted or refused.
      answer_tokens: expected length of an answer. Each was cut at 96 tokens: if answers end at any
        token alike, the estimate is the tokens of all for each that ended before.
    """

    accepted: tuple[tuple[float, float], ...]
    decided: tuple[tuple[float, float], ...]
    answer_tokens: int


def measure_rates(
    batch: Batch, num_rows: int, target: LoadedModel, max_seq_len: int
) -> AcceptanceRates:
    """Answers the prompts by the first rows of a batch, which choose numbers of drafts.

    A model that hears, or whose chat template refuses the prompts, answers none of them: nothing is
    known of it before its first answer.
    """
    encoder = target.config.encoder
    if encoder is not None and encoder.is_audio:
        return AcceptanceRates((), (), 0)
    try:
        rows = _rows(target, min(batch.max_length, max_seq_len, LONGEST_MEASURED))
    except InputError:
        return AcceptanceRates((), (), 0)
    size = min(num_rows, batch.num_apart)
    groups = [rows[first : first + size] for first in range(0, len(rows), size)]
    counts = [_answer(batch, group) for group in groups]
    accepted, decided, lengths = (np.concatenate(leaves) for leaves in zip(*counts, strict=True))
    return AcceptanceRates(
        tuple(map(tuple, accepted.sum(axis=0).tolist())),
        tuple(map(tuple, decided.sum(axis=0).tolist())),
        round(float(lengths.sum()) / max(int((lengths < _MAX_NEW_TOKENS).sum()), 1)),
    )


def _rows(target: LoadedModel, longest: int) -> list[Row]:
    settings, rows = SamplingParams(max_new_tokens=_MAX_NEW_TOKENS, temperature=0.0), []
    for text in _PROMPTS:
        prompt = encode_text(target, text, chat=None, system=None)[-(longest // 2) :]
        prompt, source = read_prompt(target, Request(prompt, settings), chat=None, system=None)
        rows.append(make_row(prompt, settings, target, longest, source))
    return rows


def _answer(batch: Batch, rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns accepted and decided drafts, [rows k 2], and lengths of the answers, [rows]."""
    for number, row in enumerate(rows):
        batch.fill(number, row)
    control = batch.state.control
    assert control is not None
    most = jnp.full_like(control.forced, batch.engine.numbers[-1])
    batch.state = batch.state.replace(control=control.replace(forced=most))
    while not np.all(processes.fetch(batch.state.is_done)):
        batch.run(MAX_ROUNDS_PER_VISIT)
    control = batch.state.control
    assert control is not None
    counts = processes.fetch((control.kept, control.tried, control.num_emitted))
    for number in range(len(rows)):
        batch.finish(number)
    return tuple(leaf[: len(rows)] for leaf in counts)  # type: ignore[return-value]

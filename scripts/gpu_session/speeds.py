"""Calls and rounds of the shapes of Llama 3.2 1B and 3B, beside the memory's speed."""

import functools
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.common.timing import Loop, seconds_each, timed
from jspec.generation.batch import needed_switches
from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from jspec.generation.rows import Row
from jspec.lab.benchmarking.parts import call_loop
from jspec.lab.benchmarking.roofline import model_cost
from jspec.speculation.types import SpecState
from jspec.weights.resolver import LoadedModel
from scripts.gpu_session.products import bandwidth, chosen, kernels_by
from scripts.gpu_session.session import Work
from scripts.gpu_session.subjects import SIZES, llama

CONTEXT = 128  # tokens before a call
PROMPT = [1] * 64
LENGTH = 496  # tokens of a row; with room for a block it has 512 slots, whatever drafts
_CALLS = (1, 1), (6, 1), (16, 1), (1, 8), (1, 32)  # tokens a row, rows
_FEW_CALLS = (1, 1), (6, 1)  # of the second choice of kernels
_ROWS = 1, 8, 32
_VISITS = 8, 16  # rounds a visit
_WARM_VISITS = 3  # a graph is made by the second run
_TIMED_VISITS = 7


class Rounds(NamedTuple):
    """Visits of one batch, timed.

    Attributes:
      seconds: of a round, the median of the visits'.
      tokens: of a row in a round, in the mean.
      num_rounds: that were timed.
    """

    seconds: float
    tokens: float
    num_rounds: int


class Batch:
    """Rows in the middle of equal texts, which rounds go on with; nothing ends them."""

    def __init__(self, generator: Generator, settings: SamplingParams, num_rows: int = 1) -> None:
        """Nothing is compiled yet."""
        self._engine, self._params = generator.engine, generator.params
        self._settings, self._num_rows = settings, num_rows
        self._state: SpecState | None = None

    def visit(self, num_rounds: int) -> tuple[float, int, float]:
        """Returns the seconds of a visit, its rounds, and a row's tokens in each."""
        state = self._state if self._state is not None else self._begin()
        seconds, (self._state, infos) = timed(
            lambda: self._engine.run(self._params, state, num_rounds)
        )
        count = len(infos.num_tokens)
        return seconds, count, float(infos.num_tokens.mean()) if count else 0.0

    def time(self, num_rounds: int, visits: int = _TIMED_VISITS) -> Rounds:
        """Times visits of that many rounds, after some that do not count.

        Raises:
          ValueError: the rows have ended.
        """
        for _ in range(_WARM_VISITS):
            self.visit(num_rounds)
        found = [self.visit(num_rounds) for _ in range(visits)]
        if any(count != num_rounds for _, count, _ in found):
            raise ValueError(f"expected visits of {num_rounds} rounds, got {found[-1][1]}")
        seconds = statistics.median(seconds / count for seconds, count, _ in found)
        tokens = statistics.fmean(tokens for *_, tokens in found)
        return Rounds(seconds, tokens, visits * num_rounds)

    def restart(self, settings: SamplingParams) -> None:
        """Begins anew with other settings, such as another seed; the programs stay."""
        self._settings, self._state = settings, None

    def _begin(self) -> SpecState:
        engine, switches = self._engine, needed_switches([self._settings])
        row = Row(self._settings, PROMPT, stop_ids=(), max_length=LENGTH)
        capacity = engine.capacity_for(LENGTH)
        state = engine.prefill(self._params, row, capacity, switches)
        return jax.tree.map(lambda leaf: jnp.repeat(leaf, self._num_rows, axis=0), state)


def share_of(work: Work, model: LoadedModel, seconds: float, width: int, rows: int) -> float:
    """Returns the share of the bandwidth that a call reaches."""
    cost = model_cost(model, model.params["embedding"].dtype.itemsize)
    num_bytes = cost.call_bytes(width, context=CONTEXT, batch_size=rows)
    return num_bytes / seconds / bandwidth(work)


@functools.cache
def plain(size: str, *, is_rehearsal: bool) -> Generator:
    """Returns the plain Generator of a size, the same one at every call."""
    return Generator(llama(size, is_rehearsal=is_rehearsal), drafter="none")


def run(work: Work) -> str:
    """Measures by the best two choices of kernels that the step `products` has found."""
    bandwidth(work)
    shares = {}
    for number, choice in enumerate(chosen(work.session)[:2]):
        with kernels_by(choice):
            shares[choice] = _measure(work, choice, is_first=number == 0)
    best = max(shares, key=lambda choice: min(shares[choice].values(), default=0.0))
    listed = "; ".join(
        f"{choice}: " + ", ".join(f"{size} {share:.0%}" for size, share in own.items())
        for choice, own in shares.items()
    )
    return f"plain rounds reach, of the memory's speed, {listed}; best by {best}"


def _measure(work: Work, choice: str, *, is_first: bool) -> dict[str, float]:
    """Measures 1B and 3B, first what matters most; returns the shares of plain rounds."""
    models = {size: llama(size, is_rehearsal=work.is_rehearsal) for size in SIZES}
    plain.cache_clear()
    generators = {size: plain(size, is_rehearsal=work.is_rehearsal) for size in SIZES}
    greedy = SamplingParams(temperature=0.0, max_new_tokens=64)
    calls: dict[tuple[str, int, int], Loop] = {
        (size, width, rows): call_loop(model, width, CONTEXT, rows)
        for size, model in models.items()
        for width, rows in (_CALLS if is_first else _FEW_CALLS)
    }
    batches = {
        (size, rows): Batch(generator, greedy, rows)
        for size, generator in generators.items()
        for rows in (_ROWS if is_first else _ROWS[:1])
    }
    jobs: dict[str, Callable[[], Any]] = {
        f"{size}: call {width} x {rows}": functools.partial(loop, jnp.int32(1))
        for (size, width, rows), loop in calls.items()
    }
    jobs |= {f"{size}: rounds of {rows}": functools.partial(batch.visit, 1)
             for (size, rows), batch in batches.items()}  # fmt: skip
    ready = work.together(jobs, f"compiled, {choice}", share=0.5 if is_first else 0.7)
    shares = _time_rounds(work, choice, models, batches, ready)
    _time_calls(work, choice, models, calls, ready)
    if is_first:
        _time_host(work, choice, generators)
    return shares


def _time_rounds(
    work: Work, choice: str, models: Any, batches: dict[tuple[str, int], Batch], ready: Any
) -> dict[str, float]:
    shares = {}
    for (size, rows), batch in sorted(batches.items(), key=lambda one: one[0][1]):
        if f"{size}: rounds of {rows}" not in ready:
            continue
        for num_rounds in _VISITS if rows == 1 else _VISITS[-1:]:
            work.check_time()
            rounds = batch.time(num_rounds)
            share = share_of(work, models[size], rounds.seconds, 1, rows)
            work.record(
                "rounds", model=size, choice=choice, rows=rows, rounds_a_visit=num_rounds,
                milliseconds=1e3 * rounds.seconds, tokens_a_second=rows / rounds.seconds,
                share_of_bandwidth=share,
            )  # fmt: skip
            if rows == 1:
                shares[size] = max(share, shares.get(size, 0.0))
    return shares


def _time_calls(
    work: Work, choice: str, models: Any, calls: dict[tuple[str, int, int], Loop], ready: Any
) -> None:
    first: dict[str, float] = {}
    for (size, width, rows), loop in calls.items():
        if f"{size}: call {width} x {rows}" not in ready:
            continue
        work.check_time()
        seconds = seconds_each(loop)
        first.setdefault(size, seconds)
        work.record(
            "call", model=size, choice=choice, tokens=width, rows=rows, milliseconds=1e3 * seconds,
            times_first=seconds / first[size],
            share_of_bandwidth=share_of(work, models[size], seconds, width, rows),
        )  # fmt: skip


def _time_host(work: Work, choice: str, generators: dict[str, Generator]) -> None:
    """Measures what the host adds to rounds: text, bookkeeping and Python."""
    request = Request(PROMPT, SamplingParams(temperature=0.0, max_new_tokens=64))
    for size, generator in generators.items():
        generator.generate(request)  # compiles for its own size of cache
        work.check_time()
        stats = [generator.generate(request).stats for _ in range(5)]
        shares = [1 - one.device_seconds / one.decode_seconds for one in stats if one.num_rounds]
        work.record("host", model=size, choice=choice, share_of_decoding=statistics.median(shares))

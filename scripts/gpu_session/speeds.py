"""Calls and rounds of the shapes of Llama 3.2 1B and 3B, then 3B with drafts.

Weights are random, so drafts are accepted by a coin, with the given probability (the rule
`synthetic`); a round takes as long whatever it accepts. Plain decoding, at temperature 1 as well,
is measured in turn with each drafter: a quantised 1B, a head of EAGLE's shape, a lookup.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.common.timing import TurnLoop, seconds_each, timed
from jspec.drafters.registry import REGISTRY
from jspec.generation.batch import needed_switches
from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from jspec.generation.rows import Row
from jspec.lab.accelerators.shapes import build_eagle
from jspec.lab.analysis.theory import expected_tokens
from jspec.lab.benchmarking.roofline import call_loop, model_cost
from jspec.speculation.acceptance.synthetic import seed_of
from jspec.speculation.types import SpecState
from jspec.weights.resolver import LoadedModel
from scripts.gpu_session.products import (
    WITHOUT_CUDA_PRODUCTS,
    bandwidth,
    chosen,
    kernels_by,
)
from scripts.gpu_session.session import Work
from scripts.gpu_session.subjects import SIZES, llama

CONTEXT = 128  # tokens before a call
PROMPT = [1] * 64
LENGTH = 496  # tokens of a row; with space for a block it has 512 slots, whatever drafts
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

    def compile(self) -> None:
        """Compiles the rounds into the cache of programs, in any thread; nothing is run."""
        engine, switches = self._engine, needed_switches([self._settings])
        capacity = engine.capacity_for(LENGTH)
        state = engine.empty_state.eval_shape(self._num_rows, capacity, switches)
        engine._run.lower(self._params, state, np.int32(1)).compile()

    def visit(self, num_rounds: int) -> tuple[float, int, float]:
        """Returns the seconds of a visit, its rounds, and a row's tokens in each round."""
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
        visited = [self.visit(num_rounds) for _ in range(visits)]
        if any(count != num_rounds for _, count, _ in visited):
            raise ValueError(f"expected visits of {num_rounds} rounds, got {visited[-1][1]}")
        seconds = statistics.median(seconds / count for seconds, count, _ in visited)
        tokens = statistics.fmean(tokens for *_, tokens in visited)
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


def measure_models(work: Work) -> str:
    """Measures by the best kernels of the step `products`, and by the best of the other language.

    CUDA C++ and XLA each have an aim.
    """
    bandwidth(work)
    shares = {}
    choices = chosen(work.session)
    in_cuda = [choice for choice in choices if choice not in WITHOUT_CUDA_PRODUCTS]
    by_xla = [choice for choice in choices if choice in WITHOUT_CUDA_PRODUCTS]
    for number, choice in enumerate(sorted([*in_cuda[:1], *by_xla[:1]], key=choices.index)):
        with kernels_by(choice):
            shares[choice] = _measure(work, choice, is_first=number == 0)
    best = max(shares, key=lambda choice: min(shares[choice].values(), default=0.0))
    listed = "; ".join(
        f"{choice}: " + ", ".join(f"{size} {share:.0%}" for size, share in by_size.items())
        for choice, by_size in shares.items()
    )
    return f"plain rounds reach, of the memory's speed, {listed}; best by {best}"


def _measure(work: Work, choice: str, *, is_first: bool) -> dict[str, float]:
    models = {size: llama(size, is_rehearsal=work.is_rehearsal) for size in SIZES}
    plain.cache_clear()
    generators = {size: plain(size, is_rehearsal=work.is_rehearsal) for size in SIZES}
    greedy = SamplingParams(temperature=0.0, max_new_tokens=64)
    calls: dict[tuple[str, int, int], TurnLoop] = {
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
        f"{size}: call {width} x {rows}": functools.partial(_compile_loop, loop)
        for (size, width, rows), loop in calls.items()
    }
    jobs |= {f"{size}: rounds of {rows}": batch.compile
             for (size, rows), batch in batches.items()}  # fmt: skip
    ready = work.together(jobs, f"compiled, {choice}", share=0.5 if is_first else 0.7)
    shares = _time_rounds(work, choice, models, batches, ready)
    _time_calls(work, choice, models, calls, ready)
    if is_first:
        _time_host(work, choice, generators)
    return shares


def _compile_loop(loop: TurnLoop) -> None:
    loop.trace()()


def _time_rounds(
    work: Work, choice: str, models: Any, batches: dict[tuple[str, int], Batch], ready: Any
) -> dict[str, float]:
    shares = {}
    for (size, rows), batch in sorted(batches.items(), key=lambda item: item[0][1]):
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
    work: Work, choice: str, models: Any, calls: dict[tuple[str, int, int], TurnLoop], ready: Any
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
    request = Request(PROMPT, SamplingParams(temperature=0.0, max_new_tokens=64))
    for size, generator in generators.items():
        generator.generate(request)  # compiles for its own size of cache
        work.check_time()
        stats = [generator.generate(request).stats for _ in range(5)]
        shares = [
            1 - answer.device_seconds / answer.decode_seconds
            for answer in stats
            if answer.num_rounds
        ]
        work.record("host", model=size, choice=choice, share_of_decoding=statistics.median(shares))


RATES = 0.6, 0.75, 0.9
NUM_DRAFTS = 4
_DRAFT_WEIGHTS = "int8", "q4_0"
_ROUNDS_A_VISIT = 8
_DRAFT_VISITS = 7


def measure_drafts(work: Work) -> str:
    """Measures each drafter at each rate of acceptance."""
    bandwidth(work)
    choice = chosen(work.session)[0]
    with kernels_by(choice):
        batches = _draft_batches(work.is_rehearsal)
        jobs = {name: batch.compile for name, batch in batches.items()}
        ready = work.together(jobs)
        plain_batch = batches.pop("plain")
        decisions = [
            _time_drafter(work, choice, name, batch, plain_batch)
            for name, batch in batches.items()
            if {name, "plain"} <= ready.keys()
        ]
    return "; ".join(decisions) or "nothing was compiled in time"


def _draft_batches(is_rehearsal: bool) -> dict[str, Batch]:
    load = functools.partial(llama, is_rehearsal=is_rehearsal)
    options: dict[str, Any] = {"num_draft_tokens": NUM_DRAFTS, "acceptance": "synthetic"}
    target = load("3b")
    generators = {
        f"1B, {kind}": Generator(target, load("1b", quantization=kind), drafter="model", **options)
        for kind in _DRAFT_WEIGHTS
    }
    eagle = dataclasses.replace(
        REGISTRY["eagle"], build=functools.partial(build_eagle, has_weights=True)
    )
    generators["EAGLE"] = Generator(target, drafter=eagle, **options)
    generators["lookup"] = Generator(target, drafter="prompt_lookup", **options)
    generators["plain"] = plain("3b", is_rehearsal=is_rehearsal)
    return {name: Batch(generator, _settings(RATES[0])) for name, generator in generators.items()}


def _time_drafter(work: Work, choice: str, name: str, batch: Batch, plain_batch: Batch) -> str:
    speeds = []
    for rate in RATES if name != "lookup" else RATES[1:2]:
        work.check_time()
        plain_batch.restart(_settings(rate))
        plain_rounds = plain_batch.time(_ROUNDS_A_VISIT, _DRAFT_VISITS)
        batch.restart(_settings(rate))
        rounds = batch.time(_ROUNDS_A_VISIT, _DRAFT_VISITS)
        speeds.append(_record_drafts(work, choice, name, rate, rounds, plain_rounds))
    return f"{name}: {', '.join(f'{speed:.2f}' for speed in speeds)} times plain"


def _record_drafts(
    work: Work, choice: str, name: str, rate: float, rounds: Rounds, plain_rounds: Rounds
) -> float:
    cost = rounds.seconds / plain_rounds.seconds
    # A lookup of random texts finds nothing; what it costs to verify its drafts is known.
    expected = expected_tokens(rate, NUM_DRAFTS)
    work.record(
        "drafts", drafter=name, choice=choice, rate=rate, num_drafts=NUM_DRAFTS,
        milliseconds=1e3 * rounds.seconds, plain_milliseconds=1e3 * plain_rounds.seconds,
        cost_of_a_round=cost, tokens_a_round=rounds.tokens, expected_tokens=expected,
        times_plain=None if name == "lookup" else rounds.tokens / cost,
        times_plain_expected=expected / cost,
    )  # fmt: skip
    return expected / cost


def _settings(rate: float) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed_of(rate, 0), max_new_tokens=64)

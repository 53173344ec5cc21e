"""Speed against acceptance: rounds in which every draft is kept with a given probability."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jspec.common.errors import InputError, check_range
from jspec.drafters import DrafterOptions
from jspec.evaluation.analysis.improvement import expected_tokens, walltime_improvement
from jspec.evaluation.analysis.ratios import Ratio, speed_ratio
from jspec.evaluation.benchmarking.baselines import JSPEC_PLAIN, jspec_generators
from jspec.evaluation.benchmarking.calls import time_calls
from jspec.evaluation.benchmarking.methods import Method
from jspec.generation.generator import Generator
from jspec.generation.request import Request, Settings
from jspec.speculation.acceptance.synthetic import seed_of
from jspec.weights.resolver import LoadedModel

_CONTEXT = 256  # tokens before the calls whose costs the theorem is given


class SyntheticLine(NamedTuple):
    """What a method of generating gave at one rate of acceptance.

    Attributes:
      name: of the way.
      num_draft_tokens: a round.
      rate: with which every draft was kept.
      tokens_per_target_call: of all rounds.
      expected_tokens: likewise, by Eq. 1 of Leviathan et al.
      speedup: of decoding over plain decoding, without the prefill.
      expected_speedup: by Theorem 3.8 with the measured costs of a draft call and of a verify call,
        in plain target calls; None for a drafter that calls no draft model.
    """

    name: str
    num_draft_tokens: int
    rate: float
    tokens_per_target_call: float
    expected_tokens: float
    speedup: Ratio
    expected_speedup: float | None

    def __str__(self) -> str:
        """One line for a person."""
        ratio = "{median:.2f} [{low:.2f}, {high:.2f}]".format(**self.speedup._asdict())
        line = f"{self.name}, {self.num_draft_tokens} drafts, each kept with {self.rate:g}: "
        line += f"{self.tokens_per_target_call:.2f} tokens a call "
        line += f"(Eq. 1: {self.expected_tokens:.2f}), {ratio} times plain"
        if self.expected_speedup is not None:
            line += f" (Theorem 3.8: {self.expected_speedup:.2f})"
        return line

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return self._asdict() | {"speedup": self.speedup._asdict()}


def parse_rates(texts: Sequence[str]) -> list[float]:
    """Returns rates of acceptance.

    Raises:
      InputError: one that is none.
    """
    rates = []
    for text in texts:
        try:
            rates.append(float(text))
        except ValueError:
            raise InputError(f"expected synthetic_acceptance as numbers, got {text!r}") from None
        check_range("synthetic_acceptance", rates[-1], 0.0, 1.0)
    return rates


class _Cell(NamedTuple):
    """A method of generating at a rate of acceptance, whose Generator serves all rates.

    Attributes:
      name: of the way.
      num_draft_tokens: a round.
      rate: with which every draft is kept.
      generator: the way's.
      costs: of a draft and of the verify call, in plain target calls; None where no model drafts.
    """

    name: str
    num_draft_tokens: int
    rate: float
    generator: Generator
    costs: tuple[float, float] | None


class _Times(NamedTuple):
    """What answers took, each [repeats prompts].

    Attributes:
      seconds: of decoding.
      tokens: emitted by rounds.
      calls: of the target in them.
    """

    seconds: np.ndarray
    tokens: np.ndarray
    calls: np.ndarray


def measure_synthetic(
    target: LoadedModel,
    draft: LoadedModel | None,
    methods: Mapping[str, Method],
    options: DrafterOptions,
    rates: Sequence[float],
    texts: Sequence[str],
    max_new_tokens: int,
    repeats: int,
) -> Iterator[list[SyntheticLine]]:
    """Measures every way at every rate, by turns with plain decoding, at temperature 1.

    Args:
      target: the target.
      draft: the draft model, if any.
      methods: of generating, by name; plain decoding among them counts for nothing.
      options: of their drafters.
      rates: of acceptance.
      texts: the prompts.
      max_new_tokens: of an answer; the last round of each is cut there.
      repeats: of every answer, each with a seed of its own.

    Yields:
      After each repeat the lines of all that has been measured by then.

    Raises:
      InputError: nothing drafts, or a number of drafts is not fixed.
    """
    cells = _make_cells(target, draft, methods, options, rates)
    plain = Generator(target, drafter="none")
    times = [_Times(*np.zeros([3, repeats, len(texts)])) for _ in [plain, *cells]]
    for repeat in range(-1, repeats):  # the first round compiles
        print(f"repeat {repeat + 1} of {repeats}", file=sys.stderr, flush=True)
        for index, text in enumerate(texts):
            number = 1000 * max(repeat, 0) + index
            runs = [(plain, number), *((c.generator, seed_of(c.rate, number)) for c in cells)]
            for (generator, seed), own in zip(runs, times, strict=True):
                settings = Settings(max_new_tokens=max_new_tokens, temperature=1.0, seed=seed)
                stats = generator.generate(Request(text, settings)).stats
                if repeat >= 0:
                    place = repeat, index
                    own.seconds[place] = stats.decode_seconds
                    own.tokens[place] = stats.num_round_tokens
                    own.calls[place] = stats.num_rounds
        if repeat >= 0:
            base, *others = (_Times(*(leaf[: repeat + 1] for leaf in own)) for own in times)
            yield [_line(cell, own, base) for cell, own in zip(cells, others, strict=True)]


def _line(cell: _Cell, own: _Times, plain: _Times) -> SyntheticLine:
    """Returns what a cell gave beside plain decoding."""
    rate, number = cell.rate, cell.num_draft_tokens
    return SyntheticLine(
        cell.name,
        number,
        rate,
        float(own.tokens.sum() / own.calls.sum()),
        expected_tokens(rate, number),
        speed_ratio(own.seconds, own.tokens, plain.seconds, plain.tokens),
        None if cell.costs is None else walltime_improvement(rate, number, *cell.costs),
    )


def _costs_of(
    target: LoadedModel, draft: LoadedModel | None, method: Method
) -> tuple[float, float] | None:
    """Returns the cost of a draft and of the verify call, in plain target calls.

    None where it is no draft model that drafts.
    """
    if draft is None or method.drafter != "model":
        return None
    widths = 1, int(method.num_draft_tokens) + 1
    step, verify = (time_calls(target, width, context=_CONTEXT) for width in widths)
    return time_calls(draft, 1, context=_CONTEXT) / step, verify / step


def _make_cells(
    target: LoadedModel,
    draft: LoadedModel | None,
    methods: Mapping[str, Method],
    options: DrafterOptions,
    rates: Sequence[float],
) -> list[_Cell]:
    """Returns the methods that draft at each rate; their rule is `synthetic`."""
    methods = {name: method for name, method in methods.items() if name != JSPEC_PLAIN}
    if not methods:
        raise InputError("expected a drafter that drafts with synthetic_acceptance, got none")
    for name, method in methods.items():
        if not isinstance(method.num_draft_tokens, int):
            raise InputError(f"expected a fixed number of drafts of {name}, got auto")
    generators = jspec_generators(target, draft, methods, options, acceptance="synthetic")
    costs = {name: _costs_of(target, draft, method) for name, method in methods.items()}
    return [
        _Cell(name, int(method.num_draft_tokens), rate, generators[name], costs[name])
        for rate in rates
        for name, method in methods.items()
    ]

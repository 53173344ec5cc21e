"""Speed against acceptance: rounds in which every draft is kept with a given probability."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jspec.common.errors import InputError, check_range
from jspec.drafters import DrafterOptions
from jspec.evaluation.analysis.improvement import expected_tokens, walltime_improvement
from jspec.evaluation.analysis.ratios import Ratio, speed_ratio
from jspec.evaluation.benchmarking.answers import GenerateFn, Timings, measure, warm_up
from jspec.evaluation.benchmarking.call_parts import time_call
from jspec.evaluation.benchmarking.methods import (
    JSPEC_PLAIN,
    Method,
    answer_with,
    make_generators,
)
from jspec.evaluation.benchmarking.outcome import Outcome
from jspec.generation.generator import Generator
from jspec.speculation.acceptance.synthetic import seed_of
from jspec.weights.resolver import LoadedModel

_NOTE = "every draft is kept with a given probability: the text means nothing"
_CONTEXT = 256  # tokens before the calls whose costs the theorem is given


class SyntheticLine(NamedTuple):
    """What a method of generating gave at one rate of acceptance.

    Attributes:
      name: of the method.
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
      InputError: one that is none, or there are none.
    """
    if not texts:
        raise InputError("expected rates from 0 to 1 in --synthetic_acceptance, got none")
    rates = []
    for text in texts:
        try:
            rates.append(float(text))
        except ValueError:
            raise InputError(f"expected synthetic_acceptance as numbers, got {text!r}") from None
        check_range("synthetic_acceptance", rates[-1], 0.0, 1.0)
    return rates


def measure_synthetic(
    target: LoadedModel,
    draft: LoadedModel | None,
    methods: Mapping[str, Method],
    options: DrafterOptions,
    rates: Sequence[float],
    texts: Sequence[str],
    max_new_tokens: int,
    repeats: int,
) -> Iterator[Outcome]:
    """Measures every method at every rate, by turns with plain decoding, at temperature 1.

    Args:
      target: the target.
      draft: the draft model, if any.
      methods: of generating, by name; plain decoding is measured whether it is among them or not.
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
    methods = _drafting(methods)
    generators = make_generators(target, draft, methods, options, acceptance="synthetic")
    costs = {name: _costs_of(target, draft, method) for name, method in methods.items()}
    plain = Generator(target, drafter="none")
    answers = {
        name: answer_with(generator, max_new_tokens, temperature=1.0, decoding=True)
        for name, generator in [(JSPEC_PLAIN, plain), *generators.items()]
    }
    cells = {f"{name} at {rate:g}": (name, rate) for rate in rates for name in methods}
    runs = {cell: _at_rate(answers[name], rate) for cell, (name, rate) in cells.items()}
    runs[JSPEC_PLAIN] = answers[JSPEC_PLAIN]
    prompts = [plain.encode_prompt(text) for text in texts]
    warm_up(answers, prompts)  # one program serves all rates
    for timings in measure(runs, prompts, repeats):
        base = timings[JSPEC_PLAIN]
        lines = [
            _line(name, rate, methods[name], costs[name], timings[cell], base)
            for cell, (name, rate) in cells.items()
        ]
        record = {"is_meaningless": True, "lines": [line.to_json() for line in lines]}
        yield Outcome(record, "\n".join([_NOTE, *map(str, lines)]))


def _drafting(methods: Mapping[str, Method]) -> dict[str, Method]:
    """Returns the methods that draft.

    Raises:
      InputError: there are none, or a number of drafts is not fixed.
    """
    methods = {name: method for name, method in methods.items() if name != JSPEC_PLAIN}
    if not methods:
        raise InputError("expected a drafter that drafts with synthetic_acceptance, got none")
    for name, method in methods.items():
        if not isinstance(method.num_draft_tokens, int):
            raise InputError(f"expected a fixed number of drafts of {name}, got auto")
    return methods


def _at_rate(answer: GenerateFn, rate: float) -> GenerateFn:
    """Returns generation in which every draft is kept with a given probability."""
    return lambda prompt, seed: answer(prompt, seed_of(rate, seed))


def _line(
    name: str,
    rate: float,
    method: Method,
    costs: tuple[float, float] | None,
    own: Timings,
    plain: Timings,
) -> SyntheticLine:
    """Returns what a method at a rate gave beside plain decoding."""
    number = int(method.num_draft_tokens)
    return SyntheticLine(
        name,
        number,
        rate,
        float(own.round_tokens.sum() / own.calls.sum()),
        expected_tokens(rate, number),
        speed_ratio(own.seconds, own.tokens, plain.seconds, plain.tokens),
        None if costs is None else walltime_improvement(rate, number, *costs),
    )


def _costs_of(
    target: LoadedModel, draft: LoadedModel | None, method: Method
) -> tuple[float, float] | None:
    """Returns the cost of a draft and of the verify call, in plain target calls.

    None where no draft model drafts.
    """
    if draft is None or method.drafter != "model":
        return None
    widths = 1, int(method.num_draft_tokens) + 1
    step, verify = (time_call(target, width, _CONTEXT) for width in widths)
    return time_call(draft, 1, _CONTEXT) / step, verify / step

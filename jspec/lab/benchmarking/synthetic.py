"""Speed against acceptance: rounds in which every draft is accepted with a given probability."""

from collections.abc import Iterator, Sequence
from typing import Any

from jspec.common.errors import InputError, check_range
from jspec.common.text_table import format_table, number_cell
from jspec.generation.generator import Generator
from jspec.generation.request import SamplingParams
from jspec.lab.analysis.ratios import speed_ratio
from jspec.lab.analysis.theory import expected_tokens, walltime_improvement
from jspec.lab.benchmarking.answers import (
    JSPEC_PLAIN,
    GenerateFn,
    Timings,
    answer_with,
    measure,
    ratio_cell,
    warm_up,
)
from jspec.lab.benchmarking.measurement import (
    Measurement,
    Outcome,
    choose_prompts,
)
from jspec.lab.benchmarking.parts import time_call, with_own_head
from jspec.speculation.acceptance.synthetic import seed_of
from jspec.weights.resolver import LoadedModel

_NOTE = "every draft is accepted with a given probability: the text means nothing"
_COLUMNS = ["", "drafts", "accepted", "tokens per call", "Eq. 1", "times plain", "Theorem 3.8"]
_CONTEXT = 256  # tokens before the calls whose costs the theorem is given


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


def measure_synthetic(asked: Measurement) -> Iterator[Outcome]:
    """Measures every method at every rate, by turns with plain decoding, at temperature 1.

    Plain decoding is measured whether it is among the methods or not. The last round of an answer
    is cut. Yields after each repeat.

    Raises:
      InputError: nothing drafts, a number of drafts is not fixed, or a rate is none.
    """
    rates = parse_rates(asked.synthetic_acceptance)
    methods = {name: method for name, method in asked.methods.items() if name != JSPEC_PLAIN}
    if not methods:
        raise InputError("expected a drafter that drafts with synthetic_acceptance, got none")
    for name, (_, number) in methods.items():
        if not isinstance(number, int):
            raise InputError(f"expected a fixed number of drafts of {name}, got auto")
    texts = [prompt.text for prompt in choose_prompts(asked)[0]]
    target, draft = asked.models()
    generators = asked.generators(target, draft, *methods, acceptance="synthetic")
    costs = {
        name: _costs_of(target, with_own_head(target, draft, asked.options), int(number))
        for name, (drafter, number) in methods.items()
        if draft is not None and drafter == "model"
    }
    plain = Generator(target, drafter="none")
    settings = SamplingParams(max_new_tokens=asked.max_new_tokens, temperature=1.0)
    answers = {
        name: answer_with(generator, settings, decoding=True)
        for name, generator in [(JSPEC_PLAIN, plain), *generators.items()]
    }
    cells = {f"{name} at {rate:g}": (name, rate) for rate in rates for name in methods}
    runs = {cell: _at_rate(answers[name], rate) for cell, (name, rate) in cells.items()}
    runs[JSPEC_PLAIN] = answers[JSPEC_PLAIN]
    prompts = list(map(plain.encode_prompt, texts))
    warm_up(answers, prompts)  # one program serves all rates
    for timings in measure(runs, prompts, asked.repeats):
        lines = []
        for cell, (name, rate) in cells.items():
            both = timings[cell], timings[JSPEC_PLAIN]
            number = int(methods[name].num_draft_tokens)
            lines.append(_line(name, rate, number, costs.get(name), *both))
        rows = [
            [name, str(number), f"{rate:g}", f"{given:.2f}", f"{expected:.2f}",
             ratio_cell(speedup), number_cell(theorem, ".2f")]
            for name, number, rate, given, expected, speedup, theorem in map(dict.values, lines)
        ]  # fmt: skip
        table = format_table(_COLUMNS, rows)
        yield Outcome({"is_meaningless": True, "lines": lines}, f"{_NOTE}\n{table}")


def _at_rate(answer: GenerateFn, rate: float) -> GenerateFn:
    return lambda prompt, seed: answer(prompt, seed_of(rate, seed))


def _line(
    name: str, rate: float, number: int, costs: tuple[float, float] | None, *both: Timings
) -> dict[str, Any]:
    """Returns what a method gave beside plain decoding, in the order of `_COLUMNS`.

    The speed-up is that of decoding, without the prefill. Theorem 3.8 expects one of a drafter that
    calls a draft model.
    """
    own, plain = both
    return {
        "name": name,
        "num_draft_tokens": number,
        "rate": rate,
        "tokens_per_target_call": float(own.round_tokens.sum() / own.calls.sum()),
        "expected_tokens": expected_tokens(rate, number),
        "speedup": speed_ratio(own.seconds, own.tokens, plain.seconds, plain.tokens)._asdict(),
        "expected_speedup": costs and walltime_improvement(rate, number, *costs),
    }


def _costs_of(target: LoadedModel, draft: LoadedModel, number: int) -> tuple[float, float]:
    """Returns the cost of a draft and of the verify call, in plain target calls."""
    step, verify = (time_call(target, width, _CONTEXT) for width in (1, number + 1))
    return time_call(draft, 1, _CONTEXT) / step, verify / step

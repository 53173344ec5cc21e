"""Drafters beside one another on the user's own prompts: the table of `jspec generate --compare`.

All drafters answer every prompt by turns, several times, after a warm-up that compiles.
`python -m jspec.benchmark` also says how sure the ratios are.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.common.errors import prefixed_errors
from jspec.common.text_table import NOTHING, format_table, number_cell
from jspec.drafters import DrafterOptions, without_unread
from jspec.generation.generator import Generator
from jspec.generation.options import check_draft_sampling, check_rule_options, settings_read_by
from jspec.generation.request import Request, SamplingParams
from jspec.lab.benchmarking.answers import (
    GenerateFn,
    answer_in_turn,
    answer_with,
    forget_all,
    gives_one_text,
    one_of_each_size,
    summarise,
    timings_of,
    warm_up,
)
from jspec.lab.benchmarking.measurement import Measurement, check_methods, parse_methods
from jspec.speculation.acceptance import RuleOptions

_COLUMNS = "drafter", "tokens/s", "speed-up", "tokens a target call", "accepted", "same text"

_REPEATS = 3  # the middle one of three counts
# Of answers with fewer tokens even the middle speed changes by a third from run to run.
_FEW_TOKENS = 64


def read_methods(
    drafters: Sequence[str],
    num_draft_tokens: str,
    settings: SamplingParams,
    options: DrafterOptions,
    acceptance: str,
    rule_options: RuleOptions,
    *,
    has_draft: bool,
) -> Measurement:
    """Returns what is compared, by the names that the table gives it; no model is loaded before.

    Raises:
      InputError: a drafter that there is not, or an option that none of them reads.
    """
    parsed = parse_methods(drafters, num_draft_tokens)
    methods = dict(zip(drafters, parsed.values(), strict=True))
    check_methods(methods, options, has_draft=has_draft)
    names = [method.drafter for method in methods.values()]
    check_draft_sampling(settings, [(name, without_unread(name, options)) for name in names])
    drafting = [name for name in names if name != "none"]
    check_rule_options(rule_options, acceptance, (*drafting, "none")[0])
    return Measurement(methods=methods, options=options)


def compare_drafters(
    generators: Mapping[str, Generator],
    prompts: Sequence[list[int]],
    settings: SamplingParams,
    options: DrafterOptions,
) -> dict[str, dict[str, Any]]:
    """Lets the Generators answer the prompts, token ids, by turns: prompt k first with seed + k.

    Returns:
      Plain values of each drafter: tokens a second of decoding, that over the first's (`speedup`),
      tokens a target call, the acceptance rate, the tokens that were timed each time, and how many
      answers are the first's, token by token; None where that cannot be said, as of sampled
      answers.

    Raises:
      InputError: a prompt that cannot be answered, before anything is compiled.
    """
    answers: dict[str, GenerateFn] = {}
    for name, generator in generators.items():
        read = settings_read_by(generator.drafter, options, settings)
        for index, prompt in enumerate(prompts):
            with prefixed_errors(f"prompt {index}"):
                generator.check(Request(prompt, read))
        answers[name] = functools.partial(
            _answer, answer_with(generator, read, decoding=True), read
        )
    first, *_ = generators
    sizes = one_of_each_size(generators[first].engine, prompts, settings.max_new_tokens)
    warm_up(answers, sizes)
    forget = functools.partial(forget_all, generators.values())
    timings = timings_of(list(answer_in_turn(answers, prompts, _REPEATS, {}, forget))[-1])
    rule = generators[first].describe()["acceptance"]
    report = summarise(timings, is_one_text=gives_one_text(settings, rule))
    for name, row in report.items():
        row["num_tokens"] = int(timings[name].tokens[-1].sum())
        ratio = 1.0 if name == first else row.pop("ratio_to")[first]["median"]
        row["speedup"] = ratio if math.isfinite(ratio) else None
        row.pop("ratio_to", None)
    return report


def _answer(generate: GenerateFn, settings: SamplingParams, prompt: list[int], number: int) -> Any:
    return generate(prompt, settings.seed + number)


def format_comparison(report: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the table of `compare_drafters`."""
    rows = [
        [
            name,
            number_cell(row["tokens_per_second"], ".1f"),
            number_cell(row["speedup"], ".2f"),
            number_cell(row["tokens_per_target_call"], ".2f"),
            number_cell(row["acceptance_rate"], ".1%"),
            _same_cell(row["same_answers"], row["num_prompts"]),
        ]
        for name, row in report.items()
    ]
    table, fewest = format_table(_COLUMNS, rows), min(row["num_tokens"] for row in report.values())
    if fewest >= _FEW_TOKENS:
        return table
    return (
        f"{table}\nnote: too short to compare: {fewest} tokens were timed; give more prompts or "
        f"--max_new_tokens, for {_FEW_TOKENS} or more"
    )


def _same_cell(num_same: int | None, num_prompts: int) -> str:
    if num_same is None:
        return NOTHING
    return f"{num_same} of {num_prompts}" if num_prompts > 1 else ("no", "yes")[num_same]

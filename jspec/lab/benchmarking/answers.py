"""Times the answers of several methods of generating, by turns, and compares them."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jspec.common.errors import say
from jspec.common.text_table import NOTHING, format_table, number_cell
from jspec.common.timing import timed
from jspec.generation.auto import MOST_DRAFT_TOKENS
from jspec.generation.engine import Engine
from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from jspec.generation.rows import capacity_for
from jspec.lab.analysis.ratios import speed_ratio
from jspec.lab.analysis.spec_bench import TASKS

JSPEC_PLAIN = "jspec plain"

_TITLE = "speed-up over the program's own plain decoding / mean accepted tokens (Spec-Bench's)"
Columns = dict[str, Any]
"""One method on all prompts: `tasks`, figures by task, and `overall`, those without a task too.

Figures are `num_prompts`; `speedup` over plain decoding by the same program (see `Ratio`), None
where that was not measured; and `mean_accepted_tokens`, None without a call after those that read
the prompts.
"""


class Generated(NamedTuple):
    """An answer, and what it took after the prompt had been read.

    Attributes:
      token_ids: new ones; none where a program tells only their number.
      num_round_tokens: those given by target calls after the first, which reads the prompt.
      num_calls: how many such calls there were.
      num_proposed: drafts.
      num_accepted: drafts accepted.
      seconds: what counts as its time; None for all the time until it was there.
      num_tokens: given in these seconds; None for all.
    """

    token_ids: list[int]
    num_round_tokens: int
    num_calls: int
    num_proposed: int = 0
    num_accepted: int = 0
    seconds: float | None = None
    num_tokens: int | None = None


GenerateFn = Callable[[list[int], int], Generated]
"""(prompt ids, seed) -> the answer; a greedy one takes no notice of the seed."""

Answers = dict[str, list[list[Generated]]]
"""What each method has answered: a list of prompts' answers for each repeat begun."""


def answer_with(
    generator: Generator, settings: SamplingParams, *, decoding: bool = False
) -> GenerateFn:
    """Returns generation by a Generator under settings, with each seed added to theirs.

    With `decoding` its time is that of decoding alone: without the prompt and the first token.
    """

    def generate(prompt: list[int], seed: int) -> Generated:
        seeded = dataclasses.replace(settings, seed=settings.seed + seed)
        result = generator.generate(Request(prompt, seeded))
        stats = result.stats
        counts = stats.num_round_tokens, stats.num_rounds, stats.num_proposed, stats.num_accepted
        clock = (stats.decode_seconds, stats.num_round_tokens) if decoding else (None, None)
        return Generated(result.token_ids, *counts, *clock)

    return generate


def one_of_each_size(
    engine: Engine, prompts: Sequence[list[int]], max_new_tokens: int
) -> list[list[int]]:
    """Returns prompts that run all programs: of each size of the cache, and width of a chunk."""
    by_size = {}
    for prompt in prompts:
        capacity = capacity_for(len(prompt) + max_new_tokens, MOST_DRAFT_TOKENS + 1)
        by_size[capacity, engine.widths_of(len(prompt))] = prompt
    return [
        prompt for (capacity, widths), prompt in by_size.items()
        if not any(capacity == size and widths < more for size, more in by_size)
    ]  # fmt: skip


class Timings(NamedTuple):
    """What a method took, each array [repeats, prompts], and its last answers; see `Generated`."""

    round_tokens: np.ndarray
    calls: np.ndarray
    proposed: np.ndarray
    accepted: np.ndarray
    seconds: np.ndarray
    tokens: np.ndarray
    token_ids: list[list[int]]

    def to_json(self) -> dict[str, Any]:
        """Returns all but the answers as plain values."""
        return {key: leaf.tolist() for key, leaf in zip(self._fields, self[:-1], strict=False)}


def warm_up(methods: Mapping[str, GenerateFn], prompts: Sequence[list[int]]) -> None:
    """Lets every method answer every prompt once, so that everything is compiled."""
    for name, generate in methods.items():
        say(f"warming up {name}")
        for prompt in prompts:
            generate(prompt, 0)


def answer_in_turn(
    methods: Mapping[str, GenerateFn],
    prompts: Sequence[list[int]],
    repeats: int,
    begun: Answers,
    generators: Iterable[Generator],
) -> Iterator[Answers]:
    """Lets every method answer every prompt, by turns; yields after each prompt all up to it.

    Prompt k of repeat r has the seed 1000 r + k. What has been `begun` is not answered again. The
    Generators first forget, each time: none may look up its own answer to the same prompt.
    """
    done: Answers = {name: [list(row) for row in begun.get(name, ())] for name in methods}
    for repeat in range(repeats):
        if repeats > 1:
            say(f"repeat {repeat + 1} of {repeats}")
        for generator in generators:
            generator.forget_answers()
        for rows in done.values():
            rows.extend([[]] * (len(rows) == repeat))
        for index, prompt in enumerate(prompts):
            missing = [name for name, rows in done.items() if len(rows[repeat]) == index]
            for name in missing:
                generate = functools.partial(methods[name], prompt, 1000 * repeat + index)
                seconds, answer = timed(generate)
                if answer.seconds is None:
                    answer = answer._replace(seconds=seconds, num_tokens=len(answer.token_ids))
                done[name][repeat].append(answer)
            if missing:
                yield done
    if begun:  # perhaps nothing was missing
        yield done


def time_in_turn(
    methods: Mapping[str, GenerateFn],
    generators: Sequence[Generator],
    prompts: Sequence[list[int]],
    repeats: int,
    max_new_tokens: int,
) -> dict[str, Timings]:
    """Returns the timings of methods, warmed up, on all prompts; see `answer_in_turn`.

    The Generators are those that may look up their answers; the first one's sizes are warmed up.
    """
    warm_up(methods, one_of_each_size(generators[0].engine, prompts, max_new_tokens))
    return timings_of(list(answer_in_turn(methods, prompts, repeats, {}, generators))[-1])


def timings_of(answers: Answers) -> dict[str, Timings]:
    """Returns the timings of whole repeats."""
    return {name: _timings_of(rows) for name, rows in answers.items()}


def _timings_of(answers: Sequence[Sequence[Generated]]) -> Timings:
    leaves = np.array([[answer[1:] for answer in row] for row in answers], float)
    return Timings._make(
        [*np.moveaxis(leaves, -1, 0), [answer.token_ids for answer in answers[-1]]]
    )


def gives_one_text(settings: SamplingParams, acceptance: str) -> bool:
    """Returns whether a seed gives one text with every drafter; else texts differ by chance."""
    return settings.temperature == 0 or acceptance == "coupled"


def summarise(
    timings: Mapping[str, Timings], *, is_one_text: bool = True
) -> dict[str, dict[str, Any]]:
    """Returns each method's speed, acceptance, ratios to all others, and answers like the first's.

    What is not known of a method, or does not apply to it, is None.
    """
    report: dict[str, dict[str, Any]] = {}
    first = next(iter(timings.values())).token_ids
    for name, timing in timings.items():
        speed = timing.tokens.sum(axis=1) / timing.seconds.sum(axis=1)
        proposed, calls = timing.proposed.sum(), timing.calls.sum()
        agreeing = [ours == theirs for ours, theirs in zip(timing.token_ids, first, strict=True)]
        report[name] = {
            "tokens_per_second": float(np.median(speed)),
            "acceptance_rate": float(timing.accepted.sum() / proposed) if proposed else None,
            "tokens_per_target_call": float(timing.round_tokens.sum() / calls) if calls else None,
            "same_answers": sum(agreeing) if is_one_text and any(timing.token_ids) else None,
            "num_prompts": len(agreeing),
            "ratio_to": {
                rival: speed_ratio(
                    timing.seconds, timing.tokens, theirs.seconds, theirs.tokens
                )._asdict()
                for rival, theirs in timings.items()
                if rival != name
            },
        }
    return report


def format_summary(report: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the summary as a table: a line and a column of ratios for each method."""
    rows = []
    for name, row in report.items():
        is_known = row["same_answers"] is not None
        rows.append([
            name,
            number_cell(row["tokens_per_second"], ".1f"),
            number_cell(row["acceptance_rate"], ".1%"),
            number_cell(row["tokens_per_target_call"], ".2f"),
            "{same_answers}/{num_prompts}".format(**row) if is_known else NOTHING,
            *(ratio_cell(row["ratio_to"].get(other)) for other in report),
        ])  # fmt: skip
    columns = ["", "tokens/s", "accepted", "per call", "same", *(f"/ {name}" for name in report)]
    return format_table(columns, rows)


def ratio_cell(ratio: Mapping[str, float] | None) -> str:
    """Returns a ratio with its interval; nothing where there is none."""
    if ratio is None:
        return NOTHING
    return "{median:.2f} [{low:.2f}, {high:.2f}]".format(**ratio)


def tasks_of(categories: Sequence[str | None]) -> list[str | None]:
    """Returns the task of each prompt of a file.

    Spec-Bench's categories are grouped to its six tasks if the file has prompts of all six; names
    such as "coding" mean something else elsewhere. Other categories are their own tasks.
    """
    task_of = {category: task for task, members in TASKS.items() for category in members}
    if not set(TASKS) <= {task_of.get(category or "") for category in categories}:
        return list(categories)
    return [category and task_of.get(category, category) for category in categories]


def columns_by_method(
    timings: Mapping[str, Timings], plain_of: Mapping[str, str], tasks: Sequence[str | None]
) -> dict[str, Columns]:
    """Returns Spec-Bench's columns of every method, plain values.

    `plain_of` has, for each method, plain decoding by the same program, which may be missing;
    `tasks` those of the prompts, None where a prompt has none.
    """
    places = {
        task: np.flatnonzero([label == task for label in tasks])
        for task in dict.fromkeys(tasks)
        if task is not None
    }
    columns = {}
    for name, timing in timings.items():
        base = timings.get(plain_of[name])
        by_task = {task: _figures(timing, base, prompts) for task, prompts in places.items()}
        overall = _figures(timing, base, np.arange(len(tasks)))
        columns[name] = {"tasks": by_task, "overall": overall}
    return columns


def _figures(timing: Timings, base: Timings | None, prompts: np.ndarray) -> dict[str, Any]:
    calls = timing.calls[:, prompts].sum()
    accepted = float(timing.round_tokens[:, prompts].sum() / calls) if calls else None
    speedup = None
    if base is not None:
        # The ratio of mean speeds: each answer counts once, whatever it took.
        speeds, base_speeds = ((side.tokens / side.seconds)[:, prompts] for side in (timing, base))
        ones = np.ones_like(speeds)
        speedup = speed_ratio(ones, speeds, ones, base_speeds)._asdict()
    return {
        "num_prompts": len(prompts), "speedup": speedup, "mean_accepted_tokens": accepted
    }  # fmt: skip


def format_columns(
    columns: Mapping[str, Columns], plain_of: Mapping[str, str], title: str = ""
) -> str | None:
    """Returns a table of the methods that are no base, a line a task; None without tasks."""
    methods = [name for name in columns if name != plain_of[name]]
    if not methods:
        return None
    lines = {name: columns[name]["tasks"] | {"overall": columns[name]["overall"]}
             for name in methods}  # fmt: skip
    rows = [
        [task, str(figures["num_prompts"]), *(_cell(lines[name][task]) for name in methods)]
        for task, figures in lines[methods[0]].items()
    ]
    return f"{title or _TITLE}\n{format_table(['', 'prompts', *methods], rows)}"


def _cell(figures: Mapping[str, Any]) -> str:
    accepted = number_cell(figures["mean_accepted_tokens"], ".2f")
    return f"{ratio_cell(figures['speedup'])} / {accepted}"

"""The tables of one setting, and of the methods of generating."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jspec.lab.analysis.spec_bench import TASKS
from jspec.lab.reports.document import NOTHING, Table, code, interval, number, percent, plain
from jspec.lab.reports.scene import SHOWN, Scene
from jspec.lab.reports.timed import Timed, TimedCell, whole

_UNSAID = (None, "none", 1.0)  # of options: what they are without saying so
_CATEGORIES = {category for members in TASKS.values() for category in members}


def methods_table(
    methods: Mapping[str, Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]
) -> Table:
    """Returns what each method of a config is, and whether it keeps the target's distribution.

    A rule of the user's own may not be known here: what the runs recorded of it counts then.
    """
    from jspec.speculation.acceptance import RULES, get_rule  # loads JAX

    recorded = {
        label: fields.get("is_lossless")
        for run in runs
        for label, fields in (run.get("described") or {}).items()
    }

    rows = []
    for label, method in methods.items():
        rule, is_plain = method.get("acceptance", "rejection"), method.get("drafter") == "none"
        fields = {"draft": method.get("draft"), "weights": method.get("draft_quantization"),
               "lenience": method.get("lenience"), **(method.get("options") or {})}  # fmt: skip
        said = [code(f"{name} = {plain(v)}") for name, v in fields.items() if v not in _UNSAID]
        rows.append(
            {
                "method": code(label),
                "drafter": str(method.get("drafter")),
                "drafts a round, at most": "-" if is_plain else str(method["num_draft_tokens"]),
                "options": ", ".join(said) or NOTHING,
                "rule": NOTHING if is_plain else rule,
                "lossless": {True: "yes", False: "no", None: NOTHING}[
                    get_rule(rule).is_lossless if rule in RULES else recorded.get(label)
                ],
            }
        )
    return Table("Methods of generating", rows)


def overall_table(scene: Scene) -> Table:
    """Returns the numbers of each method over all prompts."""
    rows = []
    for method, timed in scene.numbers.items():
        row = {
            "method": code(method),
            "speed-up": interval(timed.speedup),
            "tokens/s": number(timed.tokens_per_second, 1),
            "ms a token": number(timed.milliseconds, 1),
            "drafts accepted (%)": percent(timed.acceptance),
            "alpha": interval(timed.alpha),
            "drafts a round": number(timed.proposed_per_round),
            "tokens per call": number(timed.tokens_per_call),
        }
        if scene.batch_size == 1:
            row |= {"cost of a round": interval(timed.cost),
                    "speed-up of whole answers": interval(timed.whole_speedup)}  # fmt: skip
        if scene.temperature == 0:
            row["same answers"] = "{} of {}".format(*timed.same_answers)
        rows.append(row)
    _, num_prompts, num_repeats = scene.numbers[scene.baseline].compared
    what = "Prompts" if scene.batch_size == 1 else "Batches"
    note = f"{what}: {num_prompts}; timings of each: {num_repeats}."
    return Table(f"All prompts ({scene.name})", rows, note)


def category_tables(scene: Scene) -> list[Table]:
    """Returns speed-up, tokens per call and acceptance by category; nothing without categories."""
    written: dict[str, Callable[[Timed], str]] = {
        "Speed-up by category": lambda timed: interval(timed.speedup),
        "Tokens per target call by category (drafts accepted, %)": (
            lambda timed: f"{number(timed.tokens_per_call)} ({percent(timed.acceptance)})"
        ),
    }
    note = "" if scene.shown == scene.others else SHOWN
    tables = []
    for caption, write in written.items() if scene.by_category else ():
        rows = [
            {"category": category} | {code(m): write(timed[m]) for m in scene.shown}
            for category, timed in scene.by_category.items()
        ]
        tables.append(Table(f"{caption} ({scene.name})", rows, note))
    return tables


def spec_bench_table(scene: Scene, prompts_file: str) -> list[Table]:
    """Returns Spec-Bench's columns; nothing unless the prompts' categories are exactly its 13.

    See `jspec.lab.analysis.spec_bench`; the repeats of a prompt are Spec-Bench's runs.
    """
    if set(scene.by_category) != _CATEGORIES:
        return []
    groups = {
        **{task: set(categories) for task, categories in TASKS.items()},
        "overall": _CATEGORIES,
    }
    base = scene.cells[scene.baseline]
    rows = [
        {"method": code(method)}
        | {name: _spec_bench_cell(cells, base, members) for name, members in groups.items()}
        for method, cells in scene.cells.items()
    ]
    note = (
        f"{len({cell.prompts for cell in base})} prompts from "
        f"{code(pathlib.PurePath(prompts_file).name)}; Spec-Bench (arXiv 2401.07851) has 480. The "
        "speed-up is a ratio of mean tokens/s of whole answers; repeats are averaged."
    )
    caption = f"Spec-Bench's columns ({scene.name}): speed-up / mean accepted tokens"
    return [Table(caption, rows, note)]


def _spec_bench_cell(
    cells: Sequence[TimedCell], base: Sequence[TimedCell], categories: set[str]
) -> str:
    """Returns speed-up and mean accepted tokens of a task.

    A repeat with fewer prompts than others, as an unfinished run has it, is left out.
    """
    theirs = {(cell.repeat, cell.prompts, cell.seed): cell for cell in base}
    runs: dict[int, list[tuple[TimedCell, TimedCell]]] = {}
    for cell in cells:
        baseline = theirs.get((cell.repeat, cell.prompts, cell.seed))
        if baseline is not None and {answer.category for answer in cell.answers} <= categories:
            runs.setdefault(cell.repeat, []).append((cell, baseline))
    most = max(map(len, runs.values()), default=0)
    full = [pairs for pairs in runs.values() if len(pairs) == most]
    answers = [answer for pairs in full for cell, _ in pairs for answer in cell.answers]
    num_rounds = sum(len(answer.rounds) for answer in answers)
    if not num_rounds:
        return NOTHING
    rates = [[[tokens / s for s, tokens in map(whole, pair)] for pair in run] for run in full]
    speedups = [np.divide(*np.mean(run, 0)) for run in rates]
    accepted = sum(answer.num_round_tokens for answer in answers) / num_rounds
    return f"{np.mean(speedups):.2f} / {accepted:.2f}"

"""Spec-Bench's columns: speed-up and mean accepted tokens by task, and overall.

As evaluation/speed.py of github.com/hemingkx/Spec-Bench (arXiv 2401.07851) makes them up:

    speed of a prompt       tokens of all its turns / wall time of all its turns, prompt and all
    speed-up                mean speed of the prompts / mean speed of the prompts in the base
    mean accepted tokens    mean over all rounds of the tokens that a round gives

by task and over all prompts, which weigh alike however long their answers are; the speed-ups of
several runs (here: repeats) are averaged. It counts the base's tokens by encoding its text anew, we
those that were generated.
"""

import pathlib
from collections.abc import Sequence

import numpy as np

from jspec.evaluation.analysis.spec_bench import TASKS
from jspec.evaluation.reports.document import Table
from jspec.evaluation.reports.measured import Cell
from jspec.evaluation.reports.method_tables import name_of
from jspec.evaluation.reports.scene import Summary
from jspec.evaluation.reports.wording import NOTHING, code

_CATEGORIES = {category for members in TASKS.values() for category in members}
_OVERALL = "overall"


def spec_bench_table(summary: Summary, prompts_file: str) -> Table | None:
    """Returns Spec-Bench's columns; None unless the prompts' categories are exactly its 13.

    Args:
      summary: of a scene of one answer at a time.
      prompts_file: from which the prompts are.
    """
    if set(summary.by_category) != _CATEGORIES:
        return None
    scene = summary.scene
    groups: dict[str, set[str]] = {task: set(members) for task, members in TASKS.items()}
    groups[_OVERALL] = _CATEGORIES
    base = scene.cells[scene.base]
    rows = tuple(
        (code(method), *(_cell(cells, base, members) for members in groups.values()))
        for method, cells in scene.cells.items()
    )
    num_prompts = len({cell.prompts for cell in base})
    file = code(pathlib.PurePath(prompts_file).name)
    return Table(
        f"Spec-Bench's columns ({name_of(scene)}): speed-up / mean accepted tokens",
        ("method", *groups),
        rows,
        note="As Spec-Bench, a public comparison of such drafters (arXiv 2401.07851), makes them "
        "up: a speed-up is the mean over prompts of tokens / second of the whole answer, reading "
        f"the prompt included, divided by the same mean of {scene.base_name}; the tables above "
        "divide all tokens by all seconds. Repeats are averaged. "
        f"{num_prompts} prompts from {file}; Spec-Bench itself has 480, and numbers of other "
        "prompts, models or machines cannot be compared with those here. "
        "**Mean accepted tokens** is what a target call gives, its own token included.",
    )


def _cell(own: Sequence[Cell], base: Sequence[Cell], categories: set[str]) -> str:
    """Returns speed-up and mean accepted tokens of a task."""
    runs = _runs(_of_categories(own, categories), _of_categories(base, categories))
    answers = [answer for ours, _ in runs for cell in ours for answer in cell.answers]
    num_rounds = sum(len(answer.rounds) for answer in answers)
    if not num_rounds:
        return NOTHING
    speedup = np.mean([_mean_speed(ours) / _mean_speed(theirs) for ours, theirs in runs])
    return f"{speedup:.2f} / {sum(one.num_round_tokens for one in answers) / num_rounds:.2f}"


def _mean_speed(cells: Sequence[Cell]) -> float:
    """Returns the mean over prompts of tokens a second, all turns of a prompt together."""
    num_tokens = [sum(len(answer.token_ids) for answer in cell.answers) for cell in cells]
    return float(np.mean([n / cell.seconds for n, cell in zip(num_tokens, cells, strict=True)]))


def _runs(own: Sequence[Cell], base: Sequence[Cell]) -> list[tuple[list[Cell], list[Cell]]]:
    """Returns the cells of both ways repeat by repeat, of the prompts that both have answered.

    A repeat with fewer prompts than others, as an unfinished run has it, is left out.
    """
    theirs = {(cell.repeat, cell.prompts, cell.seed): cell for cell in base}
    runs: dict[int, list[tuple[Cell, Cell]]] = {}
    for cell in own:
        if (other := theirs.get((cell.repeat, cell.prompts, cell.seed))) is not None:
            runs.setdefault(cell.repeat, []).append((cell, other))
    most = max(map(len, runs.values()), default=0)
    return [
        ([ours for ours, _ in pairs], [other for _, other in pairs])
        for pairs in runs.values()
        if len(pairs) == most
    ]


def _of_categories(cells: Sequence[Cell], categories: set[str]) -> list[Cell]:
    return [cell for cell in cells if {answer.category for answer in cell.answers} <= categories]

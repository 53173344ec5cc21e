"""Spec-Bench's columns: speed-up and mean accepted tokens by task, and overall."""

from collections.abc import Sequence

from jspec.analysis.spec_bench import TASKS
from jspec.reports.document import Table
from jspec.reports.measured import Cell
from jspec.reports.scene import Summary
from jspec.reports.speeds import compare, whole
from jspec.reports.way_tables import name_of
from jspec.reports.wording import NOTHING, code, number


def spec_bench_table(summary: Summary) -> Table | None:
    """Returns Spec-Bench's columns; None where the prompts are not its."""
    scene = summary.scene
    tasks = {
        task: own
        for task, members in TASKS.items()
        if (own := set(members) & summary.by_category.keys())
    }
    if len(tasks) < len(TASKS):
        return None
    rows = []
    for own in summary.overall:
        row = [
            _task_cell(scene.cells[own.way], scene.cells[scene.base], members)
            for members in tasks.values()
        ]
        row += [number(own.tokens_per_call), number(own.whole_speedup and own.whole_speedup.median)]
        rows.append((code(own.way), *row))
    return Table(
        f"Spec-Bench's columns ({name_of(scene)}): speed-up / mean accepted tokens",
        ("way", *tasks, "mean accepted tokens", "overall speed-up"),
        tuple(rows),
        note="As Spec-Bench has them: speed-ups are those of whole answers, and mean accepted "
        "tokens are the tokens that a target call gives, its own one included.",
    )


def _task_cell(own: Sequence[Cell], base: Sequence[Cell], categories: set[str]) -> str:
    ours, theirs = (_of_categories(cells, categories) for cells in (own, base))
    compared = compare(ours, theirs, whole, num_samples=1)
    answers = [answer for cell in ours for answer in cell.answers]
    num_rounds = sum(len(answer.rounds) for answer in answers)
    if compared is None or not num_rounds:
        return NOTHING
    per_call = sum(answer.num_round_tokens for answer in answers) / num_rounds
    return f"{compared.ratio.median:.2f} / {per_call:.2f}"


def _of_categories(cells: Sequence[Cell], categories: set[str]) -> list[Cell]:
    return [cell for cell in cells if {answer.category for answer in cell.answers} <= categories]

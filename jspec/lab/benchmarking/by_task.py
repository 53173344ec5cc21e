"""Spec-Bench's columns, by task and overall; `analysis.spec_bench` has their definitions.

The speed-up is that over plain decoding by the same program. What differs here: a speed-up is the
median over repeats, theirs the mean over runs; only the first turn of a prompt is answered; and
calls that read a prompt never count, theirs do with some methods.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jspec.common.text_table import format_table, number_cell
from jspec.lab.analysis.ratios import speed_ratio
from jspec.lab.analysis.spec_bench import TASKS
from jspec.lab.benchmarking.answers import Timings, ratio_cell

_TITLE = "speed-up over the program's own plain decoding / mean accepted tokens (Spec-Bench's)"


Columns = dict[str, Any]
"""One method on all prompts: `tasks`, figures by task, and `overall`, those without a task too.

Figures are `num_prompts`; `speedup` over plain decoding by the same program (see `Ratio`), None
where that was not measured; and `mean_accepted_tokens`, None without a call after those that read
the prompts.
"""


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

    Args:
      timings: what was measured.
      plain_of: for each method, plain decoding by the same program, which may be missing.
      tasks: of each prompt, None where it has none.
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

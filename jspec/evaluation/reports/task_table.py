"""What to use for which task: the table, and how to read it."""

from collections.abc import Iterable, Mapping

from jspec.evaluation.reports.advice import FEW_PROMPTS, MOST_RIVALS, Choice, kept_share, rank
from jspec.evaluation.reports.document import Table
from jspec.evaluation.reports.scene import Scene, Summary
from jspec.evaluation.reports.wording import CONTROL, COST, NOTHING, code, interval, number

_READING = (
    "In the tables of tasks (the categories of the prompts) **use** is the fastest way over all "
    "prompts wherever it is clearly faster than {base}, its whole interval above 1, and not "
    "clearly slower than the fastest for the task: to take the winner of each would be to follow "
    "chance. Elsewhere it is the fastest for the task, if that is clearly faster, or {base}. "
    f"**Also**: up to {MOST_RIVALS} others that are clearly faster and about as fast; where "
    "{base} is to be used, the fastest drafter, which may gain or lose. Tokens per call over "
    "the cost of a round is the speed-up, but for rounding."
)
_NOISY = (
    f"**Noisy**: a round of the way, or of the control `{CONTROL}`, seemed to take less than a "
    "plain step, which it cannot. Time that task again before you go by it."
)


def by_task_table(summary: Summary, choices: Mapping[str, Choice]) -> Table:
    """Returns a line a category: what to use for it, and the numbers behind that.

    Args:
      summary: of a scene.
      choices: for each category, not all of them timed once.
    """
    scene = summary.scene
    return Table(
        f"What to use for which task ({scene.setting})",
        ("task", "use", "speed-up", "drafts kept", "tokens per call", COST, "prompts", "also"),
        tuple((category, *_advise(scene, choice)) for category, choice in choices.items()),
        text_columns=(0, 1, 7),
        note=_by_chance(summary),
    )


def explain_tasks(choices: Iterable[Choice], base: str) -> str:
    """Returns how to read the tables of these choices.

    Args:
      choices: of all tables.
      base: what a sentence calls it.
    """
    known = list(choices)
    sentences = [_READING.format(base=base)]
    if any(choice.is_noisy for choice in known):
        sentences.append(_NOISY)
    if any(choice.best.num_prompts < FEW_PROMPTS for choice in known):
        sentences.append(
            f"Intervals of fewer than {FEW_PROMPTS} prompts are too narrow: take them as hints."
        )
    return " ".join(sentences)


def _by_chance(summary: Summary) -> str:
    """Returns how many intervals would mislead: 2.5 % lie above 1 where nothing differs."""
    lows = [
        own.speedup.low
        for numbers in summary.by_category.values()
        for own in rank(summary.scene, numbers)
        if own.speedup is not None and not own.is_timed_once
    ]
    return (
        f"Of the {len(lows)} intervals of a way for a task {sum(low > 1 for low in lows)} lie "
        f"above 1. Were no way faster or slower than {summary.scene.base_name}, "
        f"{number(len(lows) / 40, 1)} would be expected to, by chance."
    )


def _advise(scene: Scene, choice: Choice) -> tuple[str, ...]:
    """Returns a line of `by_task_table` without the task."""
    own, best = choice.use, choice.best
    noisy = " (noisy)" if choice.is_noisy else ""
    if own is None:
        use = "no advice" if best.is_timed_once else f"{code(scene.base)}{noisy}"
        other = f"best: {code(best.method)} {interval(best.speedup, is_once=best.is_timed_once)}"
        return (use, *[NOTHING] * 4, str(best.num_prompts), other)
    return (
        f"{code(own.method)}{noisy}",
        interval(own.speedup),
        kept_share(own),
        number(own.tokens_per_call),
        number(own.cost),
        str(own.num_prompts),
        ", ".join(map(code, choice.also)) or NOTHING,
    )

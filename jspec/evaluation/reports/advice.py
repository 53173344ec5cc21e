"""Which way to use for which task: the fastest ones, and those that are not clearly slower."""

from collections.abc import Sequence
from typing import NamedTuple

from jspec.evaluation.reports.measured import of_category
from jspec.evaluation.reports.methods import MethodNumbers
from jspec.evaluation.reports.scene import Scene, Summary
from jspec.evaluation.reports.speeds import compare, decoding, whole
from jspec.evaluation.reports.wording import CONTROL, code, listed, percent

FEW_PROMPTS = 5
MOST_RIVALS = 3
_LEAST_COST = 0.9  # plain steps: what costs less is noise, and not faster
_CHEAP = 0.995  # plain steps: what a round cannot take less than, but for noise
_NEAR = 0.85  # ways that are slower than this share of the fastest are not its rivals


def rank(scene: Scene, numbers: Sequence[MethodNumbers]) -> list[MethodNumbers]:
    """Returns the lossless ways but the base, the fastest first."""
    candidates = [
        own
        for own in numbers
        if own.method != scene.base and own.speedup is not None and not scene.is_lossy[own.method]
    ]
    return sorted(candidates, key=speedup_of, reverse=True)


def speedup_of(own: MethodNumbers) -> float:
    """Returns a way's speed-up; 0 where there is none."""
    return own.speedup.median if own.speedup is not None else 0.0


def find_rivals(
    scene: Scene, ranked: Sequence[MethodNumbers], category: str | None = None
) -> list[str]:
    """Returns the methods that are not clearly slower than the fastest."""
    best, *rest = ranked
    clock = decoding if scene.batch_size == 1 else whole
    rivals = []
    for own in rest:
        if speedup_of(own) < _NEAR * speedup_of(best):
            break
        sides = [scene.cells[method] for method in (own.method, best.method)]
        if category is not None:
            sides = [of_category(side, category) for side in sides]
        compared = compare(*sides, clock)
        if compared is not None and compared.ratio.high >= 1:
            rivals.append(own.method)
    return rivals


class Choice(NamedTuple):
    """What to use for a task.

    Attributes:
      use: the way; None where no way is clearly faster than the base.
      best: the fastest way.
      also: others that are clearly faster than the base and not clearly slower than the fastest;
        at most MOST_RIVALS.
      is_noisy: whether a round of what is named, or of the control, seems cheaper than a plain
        step.
    """

    use: MethodNumbers | None
    best: MethodNumbers
    also: tuple[str, ...]
    is_noisy: bool = False


def choose(summary: Summary, overall: MethodNumbers) -> dict[str, Choice]:
    """Returns what to use for each category; nothing for those in which only the base was timed.

    Where the best way over all prompts is clearly faster than the base and not clearly slower than
    the best one for the category, it is the one to use: picking a winner for each category follows
    chance.

    Args:
      summary: of a scene.
      overall: the best way over all prompts.
    """
    return {
        category: _choose(summary.scene, category, ranked, overall.method)
        for category, numbers in summary.by_category.items()
        if (ranked := rank(summary.scene, numbers))
    }


def _choose(scene: Scene, category: str, ranked: Sequence[MethodNumbers], overall: str) -> Choice:
    controls = [own for own in ranked if scene.methods[own.method].get("drafter") == CONTROL]
    ranked = [own for own in ranked if own not in controls] or controls
    best = ranked[0]
    if not is_faster(best):
        return Choice(None, best, (), _is_cheap(best, *controls))
    rivals = [best.method, *find_rivals(scene, ranked, category)]
    numbers = {own.method: own for own in ranked}
    used = overall if overall in rivals and is_faster(numbers[overall]) else best.method
    also = [method for method in rivals if method != used and is_faster(numbers[method])][
        :MOST_RIVALS
    ]
    return Choice(numbers[used], best, tuple(also), _is_cheap(numbers[used], *controls))


def _is_cheap(*methods: MethodNumbers) -> bool:
    return any(own.cost is not None and own.cost < _CHEAP for own in methods)


def say_everywhere(summary: Summary, overall: MethodNumbers) -> str:
    """Returns where the best way over all prompts would slow down, and why tasks differ.

    Returns:
      A sentence or two; "" where nothing is known of it.
    """
    known = {
        category: own
        for category, numbers in summary.by_category.items()
        for own in numbers
        if own.method == overall.method and not own.is_timed_once
    }
    if not known:
        return ""
    slow = [category for category, own in known.items() if is_slower(own)]
    where = f"for {listed(slow)}" if slow else "for none of the tasks"
    text = (
        f"Used for everything, {code(overall.method)} is clearly slower than "
        f"{summary.scene.base_name} {where}."
    )
    kept = {name: own.acceptance.median for name, own in known.items() if own.acceptance}
    if not kept or max(kept.values()) == min(kept.values()):
        return text
    most, least = max(kept, key=kept.__getitem__), min(kept, key=kept.__getitem__)
    return (
        f"{text} Tasks differ because guessing is easier in some: of its drafts "
        f"{percent(kept[most])} are kept in {most}, {percent(kept[least])} in {least}."
    )


def is_faster(own: MethodNumbers) -> bool:
    """Whether it is clearly so: not by one timing alone, nor for another reason than its drafts."""
    if own.speedup is None or own.is_timed_once or not own.kept_per_round or is_noisy(own):
        return False
    return own.speedup.low > 1


def is_slower(own: MethodNumbers) -> bool:
    """Whether it is clearly so: not by one timing alone."""
    return own.speedup is not None and own.speedup.high < 1 and not own.is_timed_once


def is_noisy(own: MethodNumbers) -> bool:
    """Whether its rounds seem far cheaper than plain steps, which they cannot be."""
    return own.cost is not None and own.cost < _LEAST_COST


def kept_share(own: MethodNumbers) -> str:
    """Returns the share of its drafts that a way keeps, in percent."""
    return percent(own.acceptance.median if own.acceptance else None)

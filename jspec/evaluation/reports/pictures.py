"""Which figures a scene has data for, and the data for each."""

from collections.abc import Mapping, Sequence

from jspec.common.canvas import Picture
from jspec.evaluation.reports import figures_drafts, figures_speed
from jspec.evaluation.reports.families import families, widest
from jspec.evaluation.reports.figures_speed import BatchPoint, Point
from jspec.evaluation.reports.iid import IidModel, fit
from jspec.evaluation.reports.measured import Cell, all_rounds, distinct_answers
from jspec.evaluation.reports.method_tables import shown_methods
from jspec.evaluation.reports.methods import MethodNumbers
from jspec.evaluation.reports.scene import Scene, Summary
from jspec.evaluation.reports.speeds import speed, whole
from jspec.evaluation.reports.view import View
from jspec.generation.stats import RoundCounts

_LOOKUPS = {"prompt_lookup", "ngram"}
_FEWEST_NUMBERS = 2


def scene_pictures(summary: Summary, view: View) -> list[Picture]:
    """Returns the figures of a scene of one answer at a time."""
    scene = summary.scene
    numbers = {own.method: own for own in summary.overall}
    rounds = {method: all_rounds(distinct_answers(cells)) for method, cells in scene.cells.items()}
    pictures = []
    points, models = _by_number(scene, numbers, rounds)
    has_numbers = any(len(own) >= _FEWEST_NUMBERS for own in points.values())
    if has_numbers:
        pictures.append(figures_speed.by_number(view, points, models))
    if summary.by_category:
        pictures.append(figures_speed.by_category(view, _by_category(summary)))
    wide = {
        name: method
        for name, method in _widest_or_auto(scene).items()
        if any(r.num_proposed for r in rounds.get(method, ()))
    }
    if wide:
        by_prompt = {
            name: [all_rounds([group]) for group in distinct_answers(scene.cells[method])]
            for name, method in wide.items()
        }
        pictures.append(figures_drafts.by_place(view, by_prompt))
        kept = {name: rounds[method] for name, method in wide.items()}
        pictures.append(figures_drafts.kept_histogram(view, kept))
    if (costs := _round_costs(scene, numbers)) and has_numbers:
        pictures.append(figures_drafts.round_cost(view, costs))
    if repeated := _repetition(scene):
        pictures.append(figures_drafts.repetition(view, repeated))
    return pictures


def _by_number(
    scene: Scene,
    numbers: Mapping[str, MethodNumbers],
    rounds: Mapping[str, Sequence[RoundCounts]],
) -> tuple[dict[str, list[Point]], dict[str, IidModel]]:
    """Returns what was measured of each drafter by number of drafts, and its theory."""
    points, models = {}, {}
    is_plain = scene.base_name == "plain decoding"
    for name, members in families(scene.methods).items():
        known = {method: number for method, number in members.items() if method in numbers}
        own = [
            Point(number, ratio)
            for method, number in known.items()
            if (ratio := numbers[method].speedup) is not None
        ]
        if not own:
            continue
        points[name] = own
        model = fit(
            {number: rounds[method] for method, number in known.items()},
            {number: numbers[method].cost for method, number in known.items()},
        )
        if model is not None and is_plain:
            models[name] = model
    return points, models


def _by_category(summary: Summary) -> dict[str, dict[str, figures_speed.Ratio]]:
    return {
        method: {
            category: own.speedup
            for category, numbers in summary.by_category.items()
            for own in numbers
            if own.method == method and own.speedup is not None
        }
        for method in shown_methods(summary)
    }


def _widest_or_auto(scene: Scene) -> dict[str, str]:
    """Returns the way with the most drafts of each drafter, and those whose number adapts."""
    adapting = {
        label: label
        for label, method in scene.methods.items()
        if method.get("num_draft_tokens") == "auto" and method.get("drafter") != "none"
    }
    return widest(scene.methods) | adapting


def _round_costs(
    scene: Scene, numbers: Mapping[str, MethodNumbers]
) -> dict[str, list[tuple[float, float]]]:
    """Returns drafts proposed and device seconds a round, by drafter; the base begins each line."""
    base = _cost_point(numbers[scene.base])
    points = {
        name: [
            point
            for method in members
            if method in numbers and (point := _cost_point(numbers[method])) is not None
        ]
        for name, members in families(scene.methods).items()
    }
    if base is None:
        return {}
    return {name: [base, *own] for name, own in points.items() if own}


def _cost_point(own: MethodNumbers) -> tuple[float, float] | None:
    if own.proposed_per_round is None or own.seconds_per_round is None:
        return None
    return own.proposed_per_round, own.seconds_per_round


def _repetition(scene: Scene) -> dict[str, list[tuple[float, float]]]:
    """Returns repetition and acceptance of each answer with drafts that were looked up."""
    found = {}
    for name, method in _widest_or_auto(scene).items():
        if (
            method not in scene.cells
            or not {*scene.methods[method]["drafter"].split("+")} <= _LOOKUPS
        ):
            continue
        points = [
            (answer.repetition, kept)
            for group in distinct_answers(scene.cells[method])
            for answer in group
            if answer.repetition is not None and (kept := _kept(answer.rounds)) is not None
        ]
        if points:
            found[name] = points
    return found


def _kept(rounds: Sequence[RoundCounts]) -> float | None:
    num_proposed = sum(r.num_proposed for r in rounds)
    return sum(r.num_accepted for r in rounds) / num_proposed if num_proposed else None


def batch_picture(scenes: Sequence[Scene], shown: Sequence[str], view: View) -> Picture:
    """Returns latency against throughput.

    Args:
      scenes: of one setting, by batch size.
      shown: the methods that are shown besides the base.
      view: of the scenes.
    """
    points = {
        method: [
            BatchPoint(scene.batch_size, 1000 * latency, throughput)
            for scene in scenes
            if (latency := _seconds_per_token(scene.cells.get(method, ()))) is not None
            and (throughput := speed(scene.cells.get(method, ()), whole)) is not None
        ]
        for method in (scenes[0].base, *shown)
    }
    return figures_speed.batches(view, {method: own for method, own in points.items() if own})


def _seconds_per_token(cells: Sequence[Cell]) -> float | None:
    """Returns the seconds that a reader of one answer waits for a token, on average."""
    answers = [answer for cell in cells for answer in cell.answers]
    num_tokens = sum(answer.num_round_tokens for answer in answers)
    return sum(answer.decode_seconds for answer in answers) / num_tokens if num_tokens else None

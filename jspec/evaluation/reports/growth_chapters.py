"""The chapters on what grows: the batch, and the length of an answer."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jspec.evaluation.reports.document import Block, Table
from jspec.evaluation.reports.figures_speed import Point, break_even
from jspec.evaluation.reports.pictures import batch_picture
from jspec.evaluation.reports.scene import Scene
from jspec.evaluation.reports.speeds import Comparison, compare, whole
from jspec.evaluation.reports.view import View
from jspec.evaluation.reports.wording import code, explain_setting, interval


class Growth(NamedTuple):
    """What a growing batch, or answer, does to the speed-up.

    Attributes:
      answer: where each way pays, in a sentence.
      blocks: the numbers behind it.
    """

    answer: str
    blocks: list[Block]


def batch_growth(scenes: Sequence[Scene], shown: Sequence[str], view: View) -> Growth:
    """Returns what speculation brings at each batch size, and where it stops paying.

    Args:
      scenes: of one setting, by batch size, rising; at least 2.
      shown: the ways to speak of.
      view: of the scenes.
    """
    compared = {method: [_compare(scene, method) for scene in scenes] for method in shown}
    ends = []
    for method, own in compared.items():
        sizes = [scene.batch_size for scene in scenes]
        paying = [size for size, one in zip(sizes, own, strict=True) if _pays(one)]
        ends.append(f"{code(method)} {where_it_pays('batch size {}', paying, sizes)}")
    answer = f"**As the batch grows** ({view.where}, of the sizes measured): {'; '.join(ends)}."
    blocks: list[Block] = [
        Table(
            f"Speed-up of whole batches, by batch size ({view.where})",
            ("method", *(str(scene.batch_size) for scene in scenes)),
            tuple((code(method), *map(_show, own)) for method, own in compared.items()),
            note="All tokens of a batch over all of its time, reading the prompts included, "
            f"against {view.base} at the same batch size.",
        ),
        batch_picture(scenes, shown, view),
    ]
    return Growth(answer, blocks)


def length_growth(scenes: Mapping[int, Scene], shown: Sequence[str], view: View) -> Growth:
    """Returns the speed-up of whole answers by their length, and where it begins to pay.

    Args:
      scenes: by tokens of an answer at most, rising; at least 2.
      shown: the ways to speak of.
      view: of the scenes.
    """
    compared = {
        method: {length: _compare(scene, method) for length, scene in scenes.items()}
        for method in shown
    }
    begins = []
    for method, own in compared.items():
        paying = [length for length, one in own.items() if _pays(one)]
        begins.append(f"{code(method)} {where_it_pays('answers of {} tokens', paying, list(own))}")
    points = {
        method: [Point(length, one.ratio) for length, one in own.items() if one is not None]
        for method, own in compared.items()
    }
    setting = explain_setting({**next(iter(scenes.values())).settings, "max_new_tokens": None})
    answer = f"**How long an answer must be** ({setting}; whole answers, of the lengths measured): "
    blocks: list[Block] = [
        Table(
            f"Speed-up of whole answers, by tokens of an answer at most ({setting})",
            ("method", *map(str, scenes)),
            tuple((code(method), *map(_show, own.values())) for method, own in compared.items()),
        ),
        break_even(view, {method: own for method, own in points.items() if own}),
    ]
    return Growth(f"{answer}{'; '.join(begins)}.", blocks)


def _compare(scene: Scene, method: str) -> Comparison | None:
    return compare(scene.cells.get(method, ()), scene.cells[scene.base], whole)


def _show(compared: Comparison | None) -> str:
    return interval(compared and compared.ratio)


def where_it_pays(what: str, paying: Sequence[int], measured: Sequence[int]) -> str:
    """Says at which of the rising numbers that were measured a way clearly pays.

    Args:
      what: the numbers are of, with {} in their place.
      paying: those at which it does.
      measured: all of them.
    """
    if not paying:
        return "never clearly pays"
    if list(paying) == list(measured):
        return "clearly pays at all of them"
    if list(paying) == list(measured[-1:]):
        return f"clearly pays at {what.format(paying[0])} only, the largest measured"
    if list(paying) == list(measured[-len(paying) :]):
        return f"clearly pays from {what.format(paying[0])} on"
    if list(paying) == list(measured[: len(paying)]):
        return f"clearly pays up to {what.format(paying[-1])}"
    return f"clearly pays at {what.format(', '.join(map(str, paying)))} only"


def _pays(compared: Comparison | None) -> bool:
    """Whether it clearly does: not by one timing alone."""
    return compared is not None and not compared.is_timed_once and compared.ratio.low > 1

"""The chapters on what grows: the batch, and the length of an answer."""

from collections.abc import Mapping, Sequence

from jspec.analysis.ratios import Ratio
from jspec.reports.document import Block, Paragraph, Table
from jspec.reports.figures_speed import Point, break_even
from jspec.reports.pictures import batch_picture
from jspec.reports.scene import Scene
from jspec.reports.speeds import compare, whole
from jspec.reports.view import View
from jspec.reports.wording import code, interval


def batch_blocks(scenes: Sequence[Scene], shown: Sequence[str], view: View) -> list[Block]:
    """Returns what speculation brings at each batch size, and where it stops paying.

    Args:
      scenes: of one setting, by batch size, rising; at least 2.
      shown: the ways to speak of.
      view: of the scenes.
    """
    ratios = {way: [_whole_ratio(scene, way) for scene in scenes] for way in shown}
    ends = []
    for way, own in ratios.items():
        sizes = [scene.batch_size for scene in scenes]
        paying = [size for size, ratio in zip(sizes, own, strict=True) if _pays(ratio)]
        ends.append(f"{code(way)} {where_it_pays('batch size', paying, sizes)}")
    return [
        Paragraph(f"{view.where}, of the sizes measured: {'; '.join(ends)}."),
        Table(
            f"Speed-up of whole batches, by batch size ({view.where})",
            ("way", *(str(scene.batch_size) for scene in scenes)),
            tuple((code(way), *map(interval, own)) for way, own in ratios.items()),
            note="All tokens of a batch over all of its time, reading the prompts included, "
            f"against {view.base} at the same batch size.",
        ),
        batch_picture(scenes, shown, view),
    ]


def length_blocks(scenes: Mapping[int, Scene], shown: Sequence[str], view: View) -> list[Block]:
    """Returns the speed-up of whole answers by their length, and where it begins to pay.

    Args:
      scenes: by tokens of an answer at most, rising; at least 2.
      shown: the ways to speak of.
      view: of the scenes.
    """
    ratios = {
        way: {length: _whole_ratio(scene, way) for length, scene in scenes.items()} for way in shown
    }
    begins = []
    for way, own in ratios.items():
        paying = [length for length, ratio in own.items() if _pays(ratio)]
        begins.append(f"{code(way)} {where_it_pays('answers of', paying, list(own))}")
    points = {
        way: [Point(length, ratio) for length, ratio in own.items() if ratio is not None]
        for way, own in ratios.items()
    }
    return [
        Paragraph(f"{view.where}, of the lengths measured: {'; '.join(begins)}."),
        Table(
            f"Speed-up of whole answers, by tokens of an answer at most ({view.where})",
            ("way", *map(str, scenes)),
            tuple((code(way), *map(interval, own.values())) for way, own in ratios.items()),
        ),
        break_even(view, {way: own for way, own in points.items() if own}),
    ]


def _whole_ratio(scene: Scene, way: str) -> Ratio | None:
    compared = compare(scene.cells.get(way, ()), scene.cells[scene.base], whole)
    return compared and compared.ratio


def where_it_pays(what: str, paying: Sequence[int], measured: Sequence[int]) -> str:
    """Says at which of the rising numbers that were measured a way clearly pays."""
    if not paying:
        return "never clearly pays"
    if list(paying) == list(measured):
        return "clearly pays at all of them"
    if list(paying) == list(measured[-len(paying) :]):
        return f"clearly pays from {what} {paying[0]} on"
    if list(paying) == list(measured[: len(paying)]):
        return f"clearly pays up to {what} {paying[-1]}"
    return f"clearly pays at {what} {', '.join(map(str, paying))} only"


def _pays(ratio: Ratio | None) -> bool:
    return ratio is not None and ratio.low > 1

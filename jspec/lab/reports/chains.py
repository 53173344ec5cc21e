"""The chapters of a report on kind "functions": what guesses save in chains that are no text."""

from collections.abc import Mapping, Sequence
from typing import Any

from jspec.common.figures import Curves, Picture, new_figure, to_picture
from jspec.lab.reports.computed import table_of
from jspec.lab.reports.document import Block, Heading
from jspec.lab.reports.workdir import View, Workdir

_WIDTH = 8  # pixels of an image's row
_CALLS, _KEPT, _SPEED = 1, 2, 4  # columns of the record


def functions_chapters(workdir: Workdir, view: View) -> list[Block]:
    """Returns a chapter for each chain, after a figure of all."""
    records = {line["key"]["functions"]: line["record"] for line in workdir.done}
    blocks: list[Block] = [_figure(records, view)]
    for index, (label, record) in enumerate(records.items(), 1):
        blocks += [Heading(label), record["notes"], table_of(record)]
        if "images" in record:
            blocks.append(_images(record, f"images-{index}", f"{view.title}: {label}"))
    return blocks


def _figure(records: Mapping[str, Mapping[str, Any]], view: View) -> Picture:
    numbers = sorted({row[0] for record in records.values() for row in record["rows"]})
    panels = []
    for column, name in ((_CALLS, "values per call of g"), (_KEPT, "share of guesses kept"),
                         (_SPEED, "times g alone")):  # fmt: skip
        lines = {}
        for label, record in records.items():
            known = {row[0]: row[column] for row in record["rows"]}
            lines[label] = [known.get(number) for number in numbers]
        reference = "g alone" if column != _KEPT else ""
        panels.append(Curves(numbers, lines, "guesses a round", name, True, reference=reference))
    return view.draw("functions", panels, "What guesses save", "")


def _images(record: Mapping[str, Any], name: str, title: str) -> Picture:
    kept = sum(map(sum, record["is_guess"])) / sum(map(len, record["is_guess"]))
    subtitle = f"{len(record['images'])} images; {100 * kept:.0f} % of the pixels are f's guesses"
    figure, panels = new_figure(2, title=title, subtitle=subtitle, height=2.6)
    for axes, key, heading, colours in zip(
        panels, ("images", "is_guess"), ("images", "light: guessed by f; dark: g's own"),
        ("gray_r", "cividis"), strict=True,
    ):  # fmt: skip
        axes.imshow(_tiled(record[key]), cmap=colours)
        axes.set_title(heading, fontsize=9)
        axes.set_axis_off()
    description = "images, and which of their pixels f guessed"
    return to_picture(figure, name, caption="", description=description)


def _tiled(images: Sequence[Sequence[int]]) -> list[list[float]]:
    per_line, rows = 6, []
    for begin in range(0, len(images), per_line):
        line = images[begin : begin + per_line]
        for y in range(_WIDTH):
            row: list[float] = []
            for image in [*line, *[[0] * _WIDTH**2] * (per_line - len(line))]:
                row += [float(level) for level in image[_WIDTH * y : _WIDTH * (y + 1)]] + [0.0]
            rows.append(row)
        rows.append([0.0] * len(rows[-1]))
    return rows

"""What was drawn: the data of matplotlib's figures."""

from jspec.common.figures import MARKERS


def lines_of(axes):
    """Returns the points of every line that has a marker, without those of error bars."""
    drawn = [line for line in axes.get_lines() if line.get_marker() in MARKERS]
    return [[tuple(map(float, point)) for point in line.get_xydata()] for line in drawn]


def bars_of(axes):
    """Returns the ends of every error bar, by the figure's order."""
    return [
        [tuple(map(float, end)) for end in segment]
        for container in axes.containers
        for bar in container.lines[2]
        for segment in bar.get_segments()
    ]


def legend_of(figure):
    """Returns the names under a figure."""
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]

"""How figures look, and how they become pictures. matplotlib is loaded when the first is drawn.

Lines differ in marker and stroke, not in colour alone: figures must be readable in black and white.
"""

import io
import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from jspec.common.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e2e2e2",
}
_COLOURS = ("#0b3d91", "#b34700", "#1c5e20", "#7a1f7a", "#5c5c5c", "#a11515", "#00767a", "#8a6d00",
            "#c2478f", "#1c1c1c")  # fmt: skip
MARKERS = "os^DvPX*<>p"
_STROKES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (8, 2, 2, 2)))
_HANDLE_WIDTH, _CHARACTER_WIDTH, _LINE_HEIGHT = 0.65, 0.082, 0.2  # inches
_DPI = 110
_NUM_COLOURS = 64  # of a PNG: reports are committed


class Picture(NamedTuple):
    """A figure, which is written to files of its name too.

    Attributes:
      name: of the files, without an ending.
      caption: what it shows and how to read it.
      description: the same for whoever cannot see it.
      svg: the picture; its ids are its own.
      png: the same.
    """

    name: str
    caption: str
    description: str
    svg: str
    png: bytes


def new_figure(
    num_panels: int = 1, *, width: float = 7.2, height: float = 4.0, share_y: bool = True
) -> "tuple[Figure, list[Axes]]":
    """Returns a figure and its panels, side by side.

    Args:
      num_panels: panels.
      width: inches.
      height: inches.
      share_y: whether the panels share the vertical axis.

    Raises:
      InputError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            'pictures need matplotlib, which is not installed: pip install "jspec[report]"'
        ) from None
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        panels = figure.subplots(1, num_panels, sharey=share_y, squeeze=False)[0]
    return figure, list(panels)


def looks() -> Iterator[dict[str, Any]]:
    """Yields a look for each line of a figure, each another pair of marker and stroke."""
    cycles = map(itertools.cycle, (_COLOURS, MARKERS, _STROKES))
    for colour, marker, stroke in zip(*cycles, strict=True):
        yield {"color": colour, "marker": marker, "linestyle": stroke}


def mark_base(axes: "Axes", *, is_vertical: bool = False) -> None:
    """Draws the line of plain decoding's speed, 1."""
    line = axes.axvline if is_vertical else axes.axhline
    line(1.0, color="#1c1c1c", linewidth=1.0, linestyle=(0, (2, 2)), zorder=1)


def as_label(text: str) -> str:
    """Returns a label as matplotlib shows it letter for letter: no formula, nothing hidden."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def whole_ticks(axes: "Axes") -> None:
    """Puts the ticks of the horizontal axis at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def begin_at_zero(axes: "Axes") -> None:
    """Begins the vertical axis at 0, and leaves room above the highest marker."""
    axes.set_ylim(0, 1.04 * axes.get_ylim()[1])


def add_legend(figure: "Figure", *panels: "Axes") -> None:
    """Puts the panels' legend under the figure, where it hides nothing; makes room for it."""
    found = [axes.get_legend_handles_labels() for axes in panels]
    handles, labels = ([one for own in side for one in own] for side in zip(*found, strict=True))
    if handles:
        label_width = _HANDLE_WIDTH + _CHARACTER_WIDTH * max(map(len, labels))
        num_columns = max(int(figure.get_figwidth() / label_width), 1)
        num_lines = math.ceil(len(labels) / num_columns)
        figure.set_figheight(figure.get_figheight() + _LINE_HEIGHT * (num_lines - 1))
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=min(num_columns, len(labels)),
            frameon=False,
        )


def to_picture(figure: "Figure", name: str, *, caption: str, description: str) -> Picture:
    """Returns the figure as SVG and PNG.

    Args:
      figure: the figure.
      name: of its files; ids within the SVG follow from it, so that pictures share a page.
      caption: what it shows and how to read it.
      description: for whoever cannot see it.
    """
    import matplotlib

    files = {}
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):
        for kind in ("svg", "png"):
            buffer = io.BytesIO()
            metadata = {"Date": None} if kind == "svg" else None
            figure.savefig(buffer, format=kind, dpi=_DPI, metadata=metadata, facecolor="white")
            files[kind] = buffer.getvalue()
    svg = files["svg"].decode("utf-8")
    return Picture(name, caption, description, svg, _with_few_colours(files["png"]))


def _with_few_colours(png: bytes) -> bytes:
    """Returns a smaller PNG that looks alike."""
    from PIL import Image

    buffer = io.BytesIO()
    image = Image.open(io.BytesIO(png)).convert("RGB")
    few = image.quantize(_NUM_COLOURS, Image.Quantize.FASTOCTREE)  # truest to thin lines
    few.save(buffer, format="png", optimize=True)
    return buffer.getvalue()

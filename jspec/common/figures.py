"""Figures and how they become pictures. matplotlib is loaded when the first is drawn.

Lines differ in marker and stroke, not in colour alone. Title, legend and what was measured where
are parts of the picture.
"""

import io
import itertools
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jspec.common.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Known = float | tuple[float, float, float]  # alone, or with the ends of its interval
Value = Known | None

INK = "#1c1c1c"
MARKERS = "os^DvPX*<>p"
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
_COLOURS = ("#0b3d91", "#b34700", "#1c5e20", "#7a1f7a", "#5c5c5c", "#a11515", "#00767a", "#8a6d00")
_STROKES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (8, 2, 2, 2)))
_PANEL_WIDTH, _CHARACTERS_AN_INCH = 3.5, 14.3  # inches; of the title's font
_HANDLE_WIDTH, _CHARACTER_WIDTH, _LINE_HEIGHT = 0.65, 0.082, 0.2  # inches, of a legend
_DPI, _NUM_COLOURS = 100, 64  # of a PNG: reports are committed
_MARKS_A_LINE, _FAR_APART = 8, 3


class Picture(NamedTuple):
    """A figure, which is also written to files.

    Attributes:
      name: of the files, without an ending.
      caption: how to read it.
      description: the same for readers who cannot see it.
      svg: with ids that are unique, so that several fit into one page.
      png: the same picture.
    """

    name: str
    caption: str
    description: str
    svg: str
    png: bytes


class Curves(NamedTuple):
    """One panel of lines over a common axis. At whole numbers, error bars are set side by side.

    Attributes:
      x: positions on it; or names, at whose places points are not joined.
      lines: values by label; points whose value is None are left out.
      x_label: of the axis.
      y_label: of the other axis.
      begins_at_zero: whether the other axis begins at 0.
      title: of the panel.
      reference: label of a dotted line at 1; "" for none.
      log_x: whether the axis is logarithmic, with ticks at the positions.
    """

    x: Sequence[float] | Sequence[str]
    lines: Mapping[str, Sequence[Value]]
    x_label: str
    y_label: str
    begins_at_zero: bool = False
    title: str = ""
    reference: str = ""
    log_x: bool = False


def new_figure(
    num_panels: int = 1, *, title: str, subtitle: str, height: float = 4.0, share_y: bool = False
) -> "tuple[Figure, list[Axes]]":
    """Returns a figure and panels side by side; an `InputError` if matplotlib is missing."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            'pictures need matplotlib, which is not installed: pip install "jspec[report]"'
        ) from None
    width = _PANEL_WIDTH * max(num_panels, 2)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        panels = figure.subplots(1, num_panels, sharey=share_y, squeeze=False)[0]
        lines = textwrap.wrap(subtitle, int(_CHARACTERS_AN_INCH * width))
        text = as_label("\n".join([title, *lines]).strip())
        figure.suptitle(text, x=0.01, ha="left", fontsize=9)
    return figure, list(panels)


def looks() -> Iterator[dict[str, Any]]:
    """Yields a look for each line of a figure, each another pair of marker and stroke."""
    cycles = map(itertools.cycle, (_COLOURS, MARKERS, _STROKES))
    for colour, marker, stroke in zip(*cycles, strict=True):
        yield {"color": colour, "marker": marker, "linestyle": stroke, "markersize": 5}


def as_label(text: str) -> str:
    """Returns a text that matplotlib shows letter for letter: no formula, nothing hidden."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def draw(
    name: str,
    curves: Sequence[Curves],
    *,
    caption: str,
    title: str = "",
    subtitle: str = "",
    share_y: bool = False,
) -> Picture:
    """Returns a figure of panels; a label has the same look in all of them.

    The title and the subtitle, what was measured where, are within the picture. With `share_y` all
    panels have the same vertical axis.
    """
    figure, panels = new_figure(len(curves), title=title, subtitle=subtitle, share_y=share_y)
    labels = dict.fromkeys(label for curve in curves for label in curve.lines)
    look_of = dict(zip(labels, looks(), strict=False))
    for axes, curve in zip(panels, curves, strict=True):
        _draw_panel(axes, curve, look_of)
    step = len(panels) if share_y else 1
    for first in range(0, len(panels), step):
        _limit_height(panels[first : first + step], curves[first : first + step])
    for axes in panels[1:] if share_y else ():
        axes.set_ylabel("")
    add_legend(figure)
    return to_picture(figure, name, caption=caption, description=f"{title}: {', '.join(look_of)}")


def _draw_panel(axes: "Axes", curves: Curves, look_of: Mapping[str, dict[str, Any]]) -> None:
    names = [as_label(x) for x in curves.x if isinstance(x, str)]
    x = list(range(len(names))) if names else [float(place) for place in curves.x]
    is_whole = all(place == int(place) for place in x) and not curves.log_x
    has_bars = any(isinstance(v, tuple) for values in curves.lines.values() for v in values)
    beside = 0.8 / len(curves.lines) if names else 0.06 * (is_whole and has_bars)
    for index, (label, values) in enumerate(curves.lines.items()):
        known = [(place, v) for place, v in zip(x, values, strict=False) if v is not None]
        look: dict[str, Any] = look_of[label] | ({"linestyle": "none"} if names else {})
        if len(known) > 2 * _MARKS_A_LINE and not names:
            step = len(known) // _MARKS_A_LINE
            look["markevery"] = (index * step // len(curves.lines), step)
        shift = beside * (index - (len(curves.lines) - 1) / 2)
        heights, bars = _split([value for _, value in known])
        axes.errorbar([place + shift for place, _ in known], heights, yerr=bars,
                      label=as_label(label), capsize=2, elinewidth=0.9, **look)  # fmt: skip
    if curves.reference:
        axes.axhline(1, color=INK, linewidth=1, linestyle=":", label=as_label(curves.reference))
    _draw_ticks(axes, curves, x, names)
    if beside:
        axes.set_xlim(min(x) - 0.5, max(x) + 0.5)
    axes.set_title(as_label(curves.title), fontsize=9)
    axes.set_xlabel(as_label(curves.x_label))
    axes.set_ylabel(as_label(curves.y_label))


def _limit_height(panels: "Sequence[Axes]", curves: Sequence[Curves]) -> None:
    """Limits the vertical axis that panels share, all drawn before: it no longer fits itself."""
    if (top := _top(curves)) is not None:
        panels[0].set_ylim(top=top)
    is_above = top is not None and all(axes.dataLim.y0 >= 0 for axes in panels)
    if is_above or any(panel.begins_at_zero for panel in curves):
        panels[0].set_ylim(bottom=0)


def _draw_ticks(axes: "Axes", curves: Curves, x: Sequence[float], names: Sequence[str]) -> None:
    if curves.log_x:
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [f"{place:g}" for place in x])
    elif names:
        axes.set_xticks(x, names, rotation=40, ha="right", rotation_mode="anchor")
        for place in x[::2]:
            axes.axvspan(place - 0.5, place + 0.5, color="#ececec", linewidth=0, zorder=0)
    elif all(place == int(place) for place in x):
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)


def _split(values: Sequence[Known]) -> tuple[list[float], list[list[float]] | None]:
    """Returns the values and their error bars' lengths, None where no value has a bar."""
    triples = [v if isinstance(v, tuple) else (v, v, v) for v in values]
    # A median over repeats may lie outside its interval: no length is below 0.
    below = [max(middle - low, 0.0) for middle, low, _ in triples]
    above = [max(high - middle, 0.0) for middle, _, high in triples]
    has_bars = any(isinstance(v, tuple) for v in values)
    return [middle for middle, _, _ in triples], [below, above] if has_bars else None


def _top(curves: Sequence[Curves]) -> float | None:
    """Returns where to cut off a line that would press all others flat, or None.

    Lines of one label in several panels count as one line.
    """
    highest: dict[str, float] = {}
    for label, line in itertools.chain(*(panel.lines.items() for panel in curves)):
        numbers = [v for v in line if isinstance(v, int | float)]
        highest |= {label: max([*numbers, highest.get(label, -math.inf)])} if numbers else {}
    tops = sorted(highest.values())
    return 1.1 * tops[-2] if len(tops) > 1 and tops[-1] > _FAR_APART * tops[-2] > 0 else None


def add_legend(figure: "Figure") -> None:
    """Puts the legend of all panels under the figure, each label once, and makes room for it."""
    pairs = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in figure.axes]
    handle_of = {label: handle for handle, label in reversed(list(itertools.chain(*pairs)))}
    labels = list(reversed(handle_of))
    if labels:
        label_width = _HANDLE_WIDTH + _CHARACTER_WIDTH * max(map(len, labels))
        num_columns = min(max(int(figure.get_figwidth() / label_width), 1), len(labels))
        num_lines = math.ceil(len(labels) / num_columns)
        figure.set_figheight(figure.get_figheight() + _LINE_HEIGHT * (num_lines - 1))
        figure.legend([handle_of[label] for label in labels], labels, loc="outside lower center",
                      ncols=num_columns, frameon=False)  # fmt: skip


def to_picture(figure: "Figure", name: str, *, caption: str, description: str) -> Picture:
    """Returns the figure as SVG and PNG; see `Picture`."""
    import matplotlib
    from PIL import Image

    svg, png, few = io.BytesIO(), io.BytesIO(), io.BytesIO()
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):
        figure.savefig(svg, format="svg", dpi=_DPI, metadata={"Date": None},
                       facecolor="white")  # fmt: skip
        figure.savefig(png, format="png", dpi=_DPI, facecolor="white")
    # With fewer colours the PNG is smaller and looks alike; this method is truest to thin lines.
    image = Image.open(png).convert("RGB").quantize(_NUM_COLOURS, Image.Quantize.FASTOCTREE)
    image.save(few, format="png", optimize=True)
    return Picture(name, caption, description, svg.getvalue().decode(), few.getvalue())

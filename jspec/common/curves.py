"""Figures of tables whose first column is a horizontal axis: the paper's curves, predictions."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jspec.common.canvas import (
    Picture,
    add_legend,
    as_label,
    begin_at_zero,
    looks,
    new_figure,
    to_picture,
)

_MARKS_A_LINE = 8
_FAR_APART = 3


class Curves(NamedTuple):
    """Lines over one axis.

    Attributes:
      x: places on it.
      lines: values by name; None where there is none.
      x_label: of the axis.
      y_label: of the other.
      begins_at_zero: whether the other begins at 0 though nothing comes near.
    """

    x: Sequence[float]
    lines: dict[str, Sequence[float | None]]
    x_label: str
    y_label: str
    begins_at_zero: bool = False


def of_table(record: dict[str, Any]) -> list[Curves]:
    """Returns the curves of a table, those of each kind of value apart.

    Columns of one unit belong together; "speed, 3 drafts" (or "speed at 3 drafts") and
    "operations, 3 drafts" do not.
    """
    columns, units = record["columns"], record["units"]
    x = [row[0] for row in record["rows"]]
    kinds: dict[tuple[str, str], dict[str, Sequence[float | None]]] = {}
    for index, (name, unit) in enumerate(zip(columns, units, strict=True)):
        values = [row[index] for row in record["rows"]]
        if index and all(value is None or isinstance(value, int | float) for value in values):
            kind, mark, rest = name.partition(", " if ", " in name else " at ")
            own = kinds.setdefault((kind if mark else "", unit), {})
            own[rest if mark else name] = values
    return [
        Curves(x, lines, _label(columns[0], units[0]), _label(kind, unit))
        for (kind, unit), lines in kinds.items()
    ]


def _label(name: str, unit: str) -> str:
    return f"{name} ({unit})" if name and unit else name or unit


def _top(curves: Curves) -> float | None:
    """Returns where to cut off a line that would press all others flat; None without one."""
    tops = sorted(
        max(own)
        for values in curves.lines.values()
        if (own := [v for v in values if v is not None])
    )
    is_apart = len(tops) > 1 and tops[-1] > _FAR_APART * tops[-2] > 0
    return 1.1 * tops[-2] if is_apart else None


def _is_below_zero(curves: Curves) -> bool:
    return any(v is not None and v < 0 for values in curves.lines.values() for v in values)


def draw(name: str, curves: Sequence[Curves], *, caption: str) -> Picture:
    """Returns a figure with a panel for each kind of curves.

    Args:
      name: of its files.
      curves: the panels; at least one.
      caption: what they show.
    """
    figure, panels = new_figure(len(curves), share_y=False)
    for axes, one in zip(panels, curves, strict=True):
        step = max(len(one.x) // _MARKS_A_LINE, 1)
        for index, ((label, values), look) in enumerate(
            zip(one.lines.items(), looks(), strict=False)
        ):
            known = [float("nan") if value is None else value for value in values]
            first_mark = index * step // len(one.lines)
            axes.plot(
                one.x, known, label=as_label(label), markevery=(first_mark, step), markersize=4.5,
                **look,
            )  # fmt: skip
        if (top := _top(one)) is not None:
            axes.set_ylim(axes.get_ylim()[0] if _is_below_zero(one) else 0, top)
        elif one.begins_at_zero:
            begin_at_zero(axes)
        axes.set_xlabel(as_label(one.x_label))
        axes.set_ylabel(as_label(one.y_label))
    add_legend(figure, panels[0])
    described = "; ".join(label for one in curves for label in one.lines)
    return to_picture(figure, name, caption=caption, description=f"Curves: {described}")

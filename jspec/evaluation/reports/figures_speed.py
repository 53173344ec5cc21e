"""Figures about speed: by number of drafts, by category, by answer length, by batch size."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jspec.common.canvas import (
    Picture,
    add_legend,
    as_label,
    begin_at_zero,
    looks,
    mark_base,
    new_figure,
    to_picture,
    whole_ticks,
)
from jspec.evaluation.analysis.ratios import Ratio, error_bars
from jspec.evaluation.reports.iid import IidModel
from jspec.evaluation.reports.view import View
from jspec.evaluation.reports.wording import code

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_BESIDE = 0.08


class Point(NamedTuple):
    """A measured ratio at a place of a horizontal axis."""

    x: float
    ratio: Ratio


class BatchPoint(NamedTuple):
    """What batching does.

    Attributes:
      batch_size: answers in hand at a time.
      milliseconds: a token takes, as the reader of one answer sees it.
      tokens_per_second: of all answers together.
    """

    batch_size: int
    milliseconds: float
    tokens_per_second: float


def by_number(
    view: View, points: Mapping[str, Sequence[Point]], models: Mapping[str, IidModel]
) -> Picture:
    """Returns speed-up against the number of drafts, with the theory line of each drafter.

    Args:
      view: of the scene.
      points: measured, by drafter.
      models: theory, by drafter.
    """
    figure, (axes,) = new_figure()
    for index, ((drafter, own), look) in enumerate(zip(points.items(), looks(), strict=False)):
        look["linestyle"] = "none"
        beside = _BESIDE * (index - (len(points) - 1) / 2)  # so that markers do not hide each other
        _draw_ratios(axes, [Point(x + beside, ratio) for x, ratio in own], look, drafter)
        if drafter in models:
            numbers = range(1, int(max(point.x for point in own)) + 1)
            speedups = [models[drafter].speedup(number) for number in numbers]
            axes.plot(
                numbers,
                speedups,
                linestyle="--",
                linewidth=1.2,
                color=look["color"],
                marker=look["marker"],
                markersize=3.5,
                fillstyle="none",
            )
    mark_base(axes)
    axes.set_xlabel("drafts a round, at most (tokens)")
    axes.set_ylabel(view.speedup_axis)
    whole_ticks(axes)
    add_legend(figure, axes)
    fitted = "; ".join(
        f"{code(drafter)}: fitted alpha = {model.fitted_alpha:.2f}, c = {model.cost_ratio:.3f}"
        for drafter, model in models.items()
    )
    caption = (
        f"**Speed-up against the number of drafts** ({view.where}). Markers are measured, with "
        "95 % intervals, and moved sideways a little so that none hides another; above the dotted "
        "line drafting pays. Dashed, with small hollow "
        "markers: what theory expects (Theorem 3.8 of arXiv 2211.17192) if every draft were there "
        "and kept with the same probability, and added c plain steps to a round "
        f"({fitted}). **Fitted alpha** is not the alpha of the tables: a draft that the drafter "
        "could not offer counts as one that was refused, since the theorem expects full rounds."
    )
    return to_picture(
        figure, f"speedup-by-number{view.suffix}", caption=caption, description=_describe(points)
    )


def by_category(view: View, points: Mapping[str, Mapping[str, Ratio]]) -> Picture:
    """Returns speed-ups by category.

    Args:
      view: of the scene.
      points: the ratios, by way and category.
    """
    categories = list(dict.fromkeys(category for own in points.values() for category in own))
    height = 1.4 + 0.115 * len(categories) * (len(points) + 1)
    figure, (axes,) = new_figure(height=max(height, 2.6))
    for index, ((method, own), look) in enumerate(zip(points.items(), looks(), strict=False)):
        shift = (index - (len(points) - 1) / 2) * 0.8 / len(points)
        ratios = list(own.values())
        axes.errorbar(
            [ratio.median for ratio in ratios],
            [categories.index(category) + shift for category in own],
            xerr=error_bars(ratios),
            label=as_label(method),
            **look | {"linestyle": "none", "markersize": 4.5, "elinewidth": 1.0},
        )
    for place in range(0, len(categories), 2):
        axes.axhspan(place - 0.5, place + 0.5, color="#f3f3f3", linewidth=0, zorder=0)
    axes.grid(visible=False, axis="y")
    mark_base(axes, is_vertical=True)
    axes.set_yticks(range(len(categories)), list(map(as_label, categories)))
    axes.set_ylim(len(categories) - 0.5, -0.5)
    axes.set_xlabel(view.speedup_axis)
    add_legend(figure, axes)
    is_point = [ratio.low == ratio.high for own in points.values() for ratio in own.values()]
    bars = "" if all(is_point) else ", with 95 % intervals"
    bars += "; a marker without one was timed once" if any(is_point) and bars else ""
    caption = (
        f"**Speed-up by category** ({view.where}){bars}. Right of the dotted line drafting pays."
    )
    return to_picture(
        figure,
        f"speedup-by-category{view.suffix}",
        caption=caption,
        description="The numbers of the table of speed-ups by category.",
    )


def break_even(view: View, points: Mapping[str, Sequence[Point]]) -> Picture:
    """Returns the speed-up of whole answers against how long they may be, by way."""
    figure, (axes,) = new_figure()
    for (method, own), look in zip(points.items(), looks(), strict=False):
        _draw_ratios(axes, own, look, method)
    mark_base(axes)
    axes.set_xscale("log", base=2)
    lengths = sorted({point.x for own in points.values() for point in own})
    axes.set_xticks(lengths, [f"{length:g}" for length in lengths])
    axes.set_xlabel("tokens of an answer, at most")
    axes.set_ylabel(view.speedup_axis)
    add_legend(figure, axes)
    caption = (
        f"**Whole answers, by length** ({view.where}): speed-up with the time to read the prompt "
        "counted, 95 % intervals. Drafting clearly pays where the interval lies above 1."
    )
    return to_picture(
        figure, f"break-even{view.suffix}", caption=caption, description=_describe(points)
    )


def batches(view: View, points: Mapping[str, Sequence[BatchPoint]]) -> Picture:
    """Returns latency against throughput, a line a way, a marker a batch size."""
    figure, (axes,) = new_figure()
    for (method, own), look in zip(points.items(), looks(), strict=False):
        speeds = [point.tokens_per_second for point in own]
        axes.plot(speeds, [point.milliseconds for point in own], label=as_label(method), **look)
        for point in own:
            axes.annotate(
                str(point.batch_size),
                (point.tokens_per_second, point.milliseconds),
                xytext=(5, 4),
                textcoords="offset points",
                fontsize=8,
            )
    axes.set_xlabel("throughput: tokens/s of all answers together")
    axes.set_ylabel("latency: ms a token of one answer")
    begin_at_zero(axes)
    axes.set_xlim(0, 1.06 * axes.get_xlim()[1])
    add_legend(figure, axes)
    caption = (
        f"**Latency against throughput** ({view.where}). The small numbers are batch sizes. Down "
        "and to the right is better. The throughput counts the time to read the prompts, the "
        "latency does not."
    )
    described = "; ".join(
        f"{method}: "
        + ", ".join(
            f"batch {p.batch_size} {p.tokens_per_second:.0f} tokens/s {p.milliseconds:.1f} ms"
            for p in own
        )
        for method, own in points.items()
    )
    return to_picture(figure, f"batches{view.suffix}", caption=caption, description=described)


def _draw_ratios(axes: "Axes", points: Sequence[Point], look: dict[str, Any], label: str) -> None:
    ratios = [point.ratio for point in points]
    axes.errorbar(
        [point.x for point in points],
        [ratio.median for ratio in ratios],
        yerr=error_bars(ratios),
        label=as_label(label),
        capsize=3,
        elinewidth=1.0,
        **look,
    )


def _describe(points: Mapping[str, Sequence[Point]]) -> str:
    return "Speed-ups. " + "; ".join(
        f"{name}: " + ", ".join(f"{point.x:g}: {point.ratio.median:.2f}" for point in own)
        for name, own in points.items()
    )

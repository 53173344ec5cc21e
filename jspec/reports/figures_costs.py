"""The figure of what rounds cost against their width, as it was measured apart from the answers."""

from collections.abc import Mapping

from jspec.reports.canvas import (
    add_legend,
    as_label,
    begin_at_zero,
    looks,
    mark_base,
    new_figure,
    to_picture,
    whole_ticks,
)
from jspec.reports.document import Picture


def cost_by_width(costs: Mapping[int, Mapping[str, Mapping[int, float]]]) -> Picture:
    """Returns a round's cost against its number of drafts, a panel a context, a line a drafter.

    Args:
      costs: in plain steps, by context (tokens in the cache), drafter and number of drafts.
    """
    figure, panels = new_figure(len(costs))
    drafters = list(dict.fromkeys(name for own in costs.values() for name in own))
    look_of = dict(zip(drafters, looks(), strict=False))
    for axes, (context, lines) in zip(panels, costs.items(), strict=True):
        for drafter, own in lines.items():
            axes.plot(list(own), list(own.values()), label=as_label(drafter), **look_of[drafter])
        mark_base(axes)
        axes.set_title(f"{context} tokens in the cache", fontsize=10)
        axes.set_xlabel("drafts in a round")
        whole_ticks(axes)
    begin_at_zero(panels[0])  # all share it: not before the last one is drawn
    panels[0].set_ylabel("cost of a round (plain steps)")
    add_legend(figure, max(panels, key=lambda axes: len(axes.get_lines())))
    caption = (
        "**Cost of a round against its drafts**, in plain steps, measured apart from the answers. "
        "The dotted line is a plain step: a level line there would mean that drafts are free."
    )
    description = "The numbers of the table of what rounds cost."
    return to_picture(figure, "cost-by-width", caption=caption, description=description)

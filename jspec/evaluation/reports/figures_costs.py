"""The figure of what rounds cost against their width, as it was measured apart from the answers."""

from collections.abc import Mapping

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

_CHEAP = 1.5  # plain steps


def cost_by_width(costs: Mapping[str, Mapping[int, float]], context: int) -> Picture:
    """Returns a round's cost against its number of drafts, a line a drafter, dear ones apart.

    Args:
      costs: in plain steps, by drafter and number of drafts.
      context: for which they were measured, tokens.
    """
    cheap = {name: own for name, own in costs.items() if max(own.values()) <= _CHEAP}
    dear = {name: own for name, own in costs.items() if name not in cheap}
    groups = [own for own in (cheap, dear) if own]
    figure, panels = new_figure(len(groups), share_y=False)
    look_of = dict(zip(costs, looks(), strict=False))
    for axes, own in zip(panels, groups, strict=True):
        for drafter, line in own.items():
            axes.plot(list(line), list(line.values()), label=as_label(drafter), **look_of[drafter])
        mark_base(axes)
        axes.set_xlabel("drafts in a round")
        whole_ticks(axes)
        if own is dear:
            begin_at_zero(axes)
    panels[0].set_ylabel("cost of a round (plain steps)")
    add_legend(figure, *panels)
    split = " Drafters of which a round costs more are at the right." if len(groups) > 1 else ""
    caption = (
        f"**Cost of a round against its drafts**, in plain steps, measured apart from the answers, "
        f"for up to {context} tokens of prompt and answer. The dotted line is a plain step: a "
        f"level line there would mean that drafts are free.{split}"
    )
    description = "The numbers of the table of what rounds cost."
    return to_picture(figure, "cost-by-width", caption=caption, description=description)

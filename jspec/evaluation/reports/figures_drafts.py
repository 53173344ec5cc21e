"""Figures about drafts: which are kept, how many a round, what a round costs."""

from collections.abc import Mapping, Sequence

import numpy as np

from jspec.common.canvas import (
    Picture,
    add_legend,
    as_label,
    begin_at_zero,
    looks,
    new_figure,
    to_picture,
    whole_ticks,
)
from jspec.evaluation.analysis.ratios import error_bars
from jspec.evaluation.reports.methods import acceptance_by_place
from jspec.evaluation.reports.view import View
from jspec.evaluation.reports.wording import code, interval
from jspec.generation.stats import RoundCounts

_FEWEST_ROUNDS = 10
_BESIDE = 0.06
_WEAK, _STRONG = 0.2, 0.5  # correlations


def by_place(view: View, rounds: Mapping[str, Sequence[Sequence[RoundCounts]]]) -> Picture:
    """Returns how often a draft is kept, by its place in the proposal.

    Args:
      view: of the scene.
      rounds: of each way, by prompt.
    """
    figure, panels = new_figure(2)
    titles = ("of all drafts at that place", "of those with all before them kept")
    places = {
        method: _num_places([r for one in own for r in one]) for method, own in rounds.items()
    }
    rates = [
        {
            method: acceptance_by_place(own, is_conditional=is_conditional)[: places[method]]
            for method, own in rounds.items()
        }
        for is_conditional in (False, True)
    ]
    for axes, title, rate_of in zip(panels, titles, rates, strict=True):
        for index, ((method, kept), look) in enumerate(zip(rate_of.items(), looks(), strict=False)):
            beside = _BESIDE * (index - (len(rounds) - 1) / 2)  # bars do not hide each other
            axes.errorbar(
                [place + beside for place in range(1, len(kept) + 1)],
                [rate.median for rate in kept],
                yerr=error_bars(kept),
                label=as_label(method),
                capsize=2,
                elinewidth=0.8,
                **look,
            )
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("place among the drafts of a round")
        whole_ticks(axes)
        axes.set_xlim(0.5, max(map(len, rate_of.values())) + 0.5)
        axes.set_ylim(-0.02, 1.02)
    panels[0].set_ylabel("share of drafts that are kept")
    add_legend(figure, panels[0])
    caption = (
        f"**Drafts kept, by their place in the round** ({view.where}). Left: of all drafts at that "
        "place; one behind a refused draft is never kept. Right: of those before which all drafts "
        "were kept; theory that takes all drafts for equally good expects these lines to be level. "
        "95 % intervals over prompts; markers are moved sideways a little so that none hides "
        f"another. Places that fewer than {_FEWEST_ROUNDS} rounds reached are left out. (`auto` "
        "proposes many drafts where many were kept: its later places are chosen.)"
    )
    described = "; ".join(
        f"{method}: " + ", ".join(map(interval, kept)) for method, kept in rates[1].items()
    )
    return to_picture(
        figure,
        f"acceptance-by-position{view.suffix}",
        caption=caption,
        description=f"Conditional: {described}",
    )


def _num_places(rounds: Sequence[RoundCounts]) -> int:
    """Returns the places that were reached, all drafts before them kept, often enough to speak of.

    Every place where none is: little is then better than nothing.
    """
    most = max(r.num_proposed for r in rounds)
    counts = [
        sum(r.num_proposed > place and r.num_accepted >= place for r in rounds)
        for place in range(most)
    ]
    return sum(count >= _FEWEST_ROUNDS for count in counts) or most


def kept_histogram(view: View, rounds: Mapping[str, list[RoundCounts]]) -> Picture:
    """Returns how many rounds keep 0, 1, ... drafts, as a share of all rounds, a bar a way."""
    figure, (axes,) = new_figure(height=1.4 + 0.3 * len(rounds))
    most = max(r.num_accepted for own in rounds.values() for r in own)
    shares = {
        method: np.bincount([r.num_accepted for r in own], minlength=most + 1) / len(own)
        for method, own in rounds.items()
    }
    table = np.array(list(shares.values()))
    for kept in range(most + 1):
        axes.barh(
            range(len(rounds)),
            table[:, kept],
            left=table[:, :kept].sum(axis=1),
            label=f"{kept} kept",
            color=str(1 - 0.85 * kept / max(most, 1)),  # the more are kept, the darker
            edgecolor="#1c1c1c",
            linewidth=0.6,
        )
    axes.set_yticks(range(len(rounds)), list(map(as_label, rounds)))
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the rounds")
    add_legend(figure, axes)
    caption = (
        f"**Drafts kept a round** ({view.where}). A round gives one token more than it keeps. "
        "Rounds in which the drafter had nothing to say are among those that keep 0."
    )
    described = "; ".join(
        f"{method}: {', '.join(f'{one:.2f}' for one in own)}" for method, own in shares.items()
    )
    return to_picture(figure, f"kept-a-round{view.suffix}", caption=caption, description=described)


def round_cost(view: View, points: Mapping[str, Sequence[tuple[float, float]]]) -> Picture:
    """Returns what a round takes against the drafts proposed in it.

    Args:
      view: of the scene.
      points: mean drafts proposed a round, and device seconds a round, by drafter.
    """
    figure, (axes,) = new_figure(height=3.6)
    for (drafter, own), look in zip(points.items(), looks(), strict=False):
        pairs = sorted(own)
        axes.plot(
            [number for number, _ in pairs],
            [1000 * seconds for _, seconds in pairs],
            label=as_label(drafter),
            **look,
        )
    axes.set_xlabel("drafts proposed a round (mean)")
    axes.set_ylabel("time of a round (ms)")
    axes.set_xlim(left=-0.1)
    begin_at_zero(axes)
    add_legend(figure, axes)
    caption = (
        f"**Time of a round in these answers** ({view.where}): drafting and the target's call "
        "together, on the device. A level line would mean that drafts are free. A draft model has "
        "to read the prompt first; that is in its rounds here."
    )
    described = "; ".join(
        f"{drafter}: " + ", ".join(f"{n:.1f} drafts {1000 * s:.1f} ms" for n, s in own)
        for drafter, own in points.items()
    )
    return to_picture(figure, f"round-cost{view.suffix}", caption=caption, description=described)


def repetition(view: View, points: Mapping[str, Sequence[tuple[float, float]]]) -> Picture:
    """Returns acceptance of drafts that are looked up against how much the text repeats itself.

    Args:
      view: of the scene.
      points: repetition and acceptance rate of each answer, by way.
    """
    figure, (axes,) = new_figure(height=3.8)
    correlations = []
    for (method, own), look in zip(points.items(), looks(), strict=False):
        look = look | {"linestyle": "none", "markerfacecolor": "none", "markersize": 5}
        axes.plot([x for x, _ in own], [y for _, y in own], label=as_label(method), **look)
        if (correlation := _correlation(own)) is not None:
            found = f"{correlation:.2f} over {len(own)} answers"
            correlations.append(f"{code(method)} {_connected(correlation)} ({found})")
    axes.set_xlabel("share of the text's runs of 4 tokens that had occurred before")
    axes.set_ylabel("share of drafts that are kept")
    axes.set_ylim(-0.02, 1.02)
    add_legend(figure, axes)
    answer = f" {'; '.join(correlations)}." if correlations else ""
    caption = (
        "**Are looked-up drafts kept more often where prompt and answer repeat themselves?** "
        f"({view.where}){answer} A marker is an answer; in brackets correlations (1: the more, the "
        "more; 0: no connection)."
    )
    described = "; ".join(f"{method}: {len(own)} answers" for method, own in points.items())
    return to_picture(
        figure,
        f"repetition{view.suffix}",
        caption=caption,
        description=f"Repetition and drafts kept. {described}",
    )


def _connected(correlation: float) -> str:
    """Returns a correlation in a word."""
    if abs(correlation) < _WEAK:
        return "no"
    if correlation < 0:
        return "on the contrary"
    return "yes" if correlation >= _STRONG else "weakly"


def _correlation(points: Sequence[tuple[float, float]]) -> float | None:
    """Returns Pearson's correlation; None where it has no meaning."""
    if len(points) < 3:
        return None
    x, y = np.array(points, float).T
    if x.std() == 0 or y.std() == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])

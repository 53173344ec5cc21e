"""Figures of estimates: alpha by drafter, by entropy, and against lenience."""

from collections.abc import Sequence

from jspec.common.canvas import (
    Picture,
    add_legend,
    as_label,
    looks,
    new_figure,
    to_picture,
)
from jspec.evaluation.analysis.ratios import error_bars
from jspec.evaluation.reports.estimated import Estimate
from jspec.evaluation.reports.view import View

_FEWEST_PLACES = 20


def alphas(estimates: Sequence[Estimate]) -> Picture:
    """Returns alpha of every drafter with its interval, a marker a setting."""
    methods = list(dict.fromkeys(one.method for one in estimates))
    settings = list(dict.fromkeys(one.setting for one in estimates))
    figure, (axes,) = new_figure(height=1.3 + 0.3 * len(methods))
    for index, (setting, look) in enumerate(zip(settings, looks(), strict=False)):
        shift = (index - (len(settings) - 1) / 2) * 0.3
        own = [one for one in estimates if one.setting == setting and one.alpha is not None]
        known = [(methods.index(one.method), one.alpha) for one in own if one.alpha is not None]
        axes.errorbar(
            [alpha.median for _, alpha in known],
            [place + shift for place, _ in known],
            xerr=error_bars([alpha for _, alpha in known]),
            label=as_label(setting),
            capsize=2,
            **look | {"linestyle": "none", "markersize": 5, "elinewidth": 1.0},
        )
    axes.set_yticks(range(len(methods)), list(map(as_label, methods)))
    axes.set_ylim(len(methods) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.set_xlabel("alpha: probability that a draft is kept")
    add_legend(figure, axes)
    caption = "**Alpha of each drafter**, with 95 % intervals over prompts."
    described = "; ".join(
        f"{one.method}, {one.setting}: {one.alpha.median:.2f}" for one in estimates if one.alpha
    )
    return to_picture(figure, "alpha", caption=caption, description=described)


def by_entropy(estimates: Sequence[Estimate], view: View) -> Picture:
    """Returns alpha against the entropy of the target's distribution, a line a drafter."""
    figure, (axes,) = new_figure()
    for one, look in zip(estimates, looks(), strict=False):
        bins = [own for own in one.entropy if own.num_places >= _FEWEST_PLACES]
        axes.errorbar(
            [own.middle for own in bins],
            [own.alpha.median for own in bins],
            yerr=error_bars([own.alpha for own in bins]),
            label=as_label(one.method),
            capsize=3,
            elinewidth=1.0,
            **look,
        )
    axes.set_xlabel("entropy of the target's distribution (nats; middle of the bin)")
    axes.set_ylabel("alpha: probability that a draft is kept")
    axes.set_ylim(0, 1)
    axes.set_xlim(left=0)
    add_legend(figure, axes)
    caption = (
        f"**Alpha by entropy** ({view.where}): on the left the target is sure what comes next, on "
        f"the right it is not; 95 % intervals over prompts. Bins of fewer than {_FEWEST_PLACES} "
        "tokens are left out."
    )
    described = "; ".join(
        f"{one.method}: " + ", ".join(f"{own.alpha.median:.2f}" for own in one.entropy)
        for one in estimates
    )
    return to_picture(
        figure, f"alpha-by-entropy{view.suffix}", caption=caption, description=described
    )


def by_lenience(estimates: Sequence[Estimate], view: View) -> Picture:
    """Returns alpha and total variation against lenience, a line a drafter."""
    figure, panels = new_figure(2, share_y=False)
    for one, look in zip(estimates, looks(), strict=False):
        x = [lenience.lenience for lenience in one.leniences]
        values = (
            [lenience.acceptance.median for lenience in one.leniences],
            [lenience.total_variation.median for lenience in one.leniences],
        )
        for axes, own in zip(panels, values, strict=True):
            axes.plot(x, own, label=as_label(one.method), **look)
    for axes, label in zip(
        panels, ("drafts that are kept (share)", "total variation from the target"), strict=True
    ):
        axes.set_xlabel("lenience (1 is none)")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.set_xlim(1.03, 0)
    add_legend(figure, panels[0])
    caption = (
        f"**Lenience** ({view.where}): the more lenient the rule (to the right), the more drafts "
        "it keeps, and the further its answers are from the target (0 is the same, 1 "
        "has nothing in common)."
    )
    described = "; ".join(
        f"{one.method}: "
        + ", ".join(
            f"{own.lenience:g} keeps {own.acceptance.median:.2f} at "
            f"{own.total_variation.median:.2f}"
            for own in one.leniences
        )
        for one in estimates
    )
    return to_picture(figure, f"lenience{view.suffix}", caption=caption, description=described)

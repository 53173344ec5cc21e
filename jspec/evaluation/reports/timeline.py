"""When the drafter and the target worked, as Figure 5 of arXiv 2211.17192 shows it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jspec.common.canvas import Picture, new_figure, to_picture
from jspec.evaluation.reports.trace import drafting_share
from jspec.evaluation.reports.wording import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_ROUNDS = 16
_LANES = ("drafter", "target", "plain decoding")
_THICKNESS = 0.6
_INK = "#1c1c1c"


def timeline(trace: Mapping[str, Any], name: str) -> Picture:
    """Returns the timeline of a trace's first rounds.

    Boxes of the upper lane are proposals, divided by their drafts; those of the lane below are
    calls of the target, with the number of tokens that each gave. Where plain decoding was timed
    too, its steps for as many tokens are the third lane.

    Args:
      trace: with at least one round.
      name: of the picture's files.
    """
    rounds = trace["rounds"][:_MOST_ROUNDS]
    num_tokens = sum(num_given(a_round) for a_round in rounds)
    plain = [1000 * seconds for seconds in list(trace.get("plain_seconds") or ())[:num_tokens]]
    lanes = _LANES if plain else _LANES[:2]
    figure, (axes,) = new_figure(height=0.9 + 0.45 * len(lanes))
    for a_round in rounds:
        _draw_round(axes, a_round)
    for index, width in enumerate(plain):
        _draw_box(axes, sum(plain[:index]), width, lane=2, hatch="////", face="white")
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel("ms")
    axes.grid(visible=False)
    caption = (
        "**When drafter and target worked**, in the first rounds. A box above is a proposal, "
        "divided into its drafts; a box below it is one call of the target, with the number of "
        f"tokens that it gave.{_explain_plain(bool(plain))} "
        f"Drafting took {percent(drafting_share(trace), 1)} of the time of all rounds. Timed "
        "call by call, which takes a little longer than running whole rounds."
    )
    described = (
        f"A timeline: {len(rounds)} calls of the target gave {num_tokens} tokens; each: "
        + ", ".join(str(num_given(a_round)) for a_round in rounds)
    )
    return to_picture(figure, name, caption=caption, description=described)


def num_given(a_round: Mapping[str, Any]) -> int:
    """Returns how many tokens a round gave."""
    return a_round["num_accepted"] + (a_round["next"] is not None)


def _explain_plain(has_plain: bool) -> str:
    return " Hatched: the steps of plain decoding for as many tokens." if has_plain else ""


def _draw_round(axes: "Axes", a_round: Mapping[str, Any]) -> None:
    """Draws a proposal and the call that checks it, times in ms."""
    begin, drafting = 1000 * a_round["begin"], 1000 * a_round["draft_seconds"]
    num_drafts = len(a_round["drafts"])
    for index in range(max(num_drafts, 1)):
        width = drafting / max(num_drafts, 1)
        _draw_box(axes, begin + index * width, width, lane=0, face="white")
    own = 1000 * a_round["target_seconds"]
    _draw_box(axes, begin + drafting, own, lane=1, face="#c9d8ef")
    axes.text(begin + drafting + own / 2, 1, str(num_given(a_round)), ha="center", va="center")


def _draw_box(
    axes: "Axes", begin: float, width: float, *, lane: int, face: str, hatch: str = ""
) -> None:
    axes.barh(
        lane, width, left=begin, height=_THICKNESS, color=face, edgecolor=_INK, linewidth=0.6,
        hatch=hatch,
    )  # fmt: skip

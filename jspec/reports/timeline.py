"""When the drafter and the target worked, as Figure 5 of arXiv 2211.17192 shows it, as SVG."""

from collections.abc import Mapping
from typing import Any
from xml.sax.saxutils import escape

from jspec.reports.trace import visible

_WIDTH, _LEFT, _RIGHT = 800, 130, 20
_LANE, _BOX = 46, 26
_MOST_ROUNDS = 16
_TICKS = 8


def to_svg(trace: Mapping[str, Any]) -> str:
    """Returns the timeline of a trace's first rounds.

    Boxes of the upper lane are proposals, divided by their drafts; those of the lane below are
    calls of the target, with the number of tokens that each gave. Where plain decoding was timed
    too, its steps for as many tokens are the third lane.
    """
    rounds = trace["rounds"][:_MOST_ROUNDS]
    if not rounds:
        return ""
    num_tokens = sum(num_given(a_round) for a_round in rounds)
    plain = list(trace.get("plain_seconds") or ())[:num_tokens]
    last = rounds[-1]
    end = last["begin"] + last["draft_seconds"] + last["target_seconds"]
    end = max(end, sum(plain)) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / end
    shapes = [*_lane_names(bool(plain)), *_axis(end, scale, 3 if plain else 2)]
    for a_round in rounds:
        shapes += _round(a_round, scale)
    time = 0.0
    for seconds in plain:
        shapes.append(_rect(time, seconds, 2, scale, "url(#plain)"))
        time += seconds
    height = _LANE * (3 if plain else 2) + 60
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">'
        '<defs><pattern id="plain" width="6" height="6" patternUnits="userSpaceOnUse">'
        '<rect width="6" height="6" fill="#ffffff"/>'
        '<path d="M0 6L6 0" stroke="#777777" stroke-width="1"/></pattern></defs>'
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>{"".join(shapes)}</svg>'
    )


def num_given(a_round: Mapping[str, Any]) -> int:
    """Returns how many tokens a round gave."""
    return a_round["num_accepted"] + (a_round["next"] is not None)


def _lane_names(has_plain: bool) -> list[str]:
    names = ["drafter", "target", "plain decoding"][: 3 if has_plain else 2]
    return [
        f'<text x="{_LEFT - 10}" y="{_top(lane) + _BOX / 2 + 4}" text-anchor="end">{name}</text>'
        for lane, name in enumerate(names)
    ]


def _axis(end: float, scale: float, num_lanes: int) -> list[str]:
    """Returns an axis in milliseconds."""
    y = _LANE * num_lanes + 16
    right = _WIDTH - _RIGHT
    shapes = [f'<path d="M{_LEFT} {y}H{right}" stroke="#1c1c1c"/>']
    step = _round_step(end / _TICKS)
    for index in range(int(end / step) + 1):
        x = _LEFT + index * step * scale
        shapes.append(f'<path d="M{x:.1f} {y}v5" stroke="#1c1c1c"/>')
        shapes.append(
            f'<text x="{x:.1f}" y="{y + 19}" text-anchor="middle">{1000 * index * step:g}</text>'
        )
    label = f'<text x="{(_LEFT + right) / 2}" y="{y + 36}" text-anchor="middle">ms</text>'
    return [*shapes, label]


def _round_step(seconds: float) -> float:
    """Returns the next of 1, 2, 5, 10, ... units."""
    unit = 1e-6
    while unit * 10 < seconds:
        unit *= 10
    return next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= seconds)


def _round(a_round: Mapping[str, Any], scale: float) -> list[str]:
    begin, drafting = a_round["begin"], a_round["draft_seconds"]
    num_drafts = len(a_round["drafts"])
    title = "".join(map(visible, a_round["drafts"])) or "nothing"
    shapes = [_rect(begin, drafting, 0, scale, "#ffffff", f"drafts: {title}")]
    for index in range(1, num_drafts):
        x = _LEFT + (begin + drafting * index / num_drafts) * scale
        shapes.append(f'<path d="M{x:.2f} {_top(0)}v{_BOX}" stroke="#1c1c1c" stroke-width="0.5"/>')
    own = a_round["target_seconds"]
    given = num_given(a_round)
    shapes.append(_rect(begin + drafting, own, 1, scale, "#c9d8ef", f"{given} tokens"))
    middle = _LEFT + (begin + drafting + own / 2) * scale
    y = _top(1) + _BOX / 2 + 4
    shapes.append(f'<text x="{middle:.1f}" y="{y}" text-anchor="middle">{given}</text>')
    return shapes


def _rect(begin: float, seconds: float, lane: int, scale: float, fill: str, title: str = "") -> str:
    shape = (
        f'<rect x="{_LEFT + begin * scale:.2f}" y="{_top(lane)}" width="{seconds * scale:.2f}" '
        f'height="{_BOX}" fill="{fill}" stroke="#1c1c1c" stroke-width="0.8"'
    )
    return f"{shape}><title>{escape(title)}</title></rect>" if title else f"{shape}/>"


def _top(lane: int) -> int:
    return 10 + lane * _LANE

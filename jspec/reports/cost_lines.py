"""What rounds cost against their width, as it was measured apart from the answers."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jspec.costs import RoundCosts
from jspec.reports.document import Block, Heading, Table
from jspec.reports.families import families
from jspec.reports.figures_costs import cost_by_width
from jspec.reports.wording import NOTHING, code, number


class CostLine(NamedTuple):
    """What rounds of one drafter cost at one context.

    Attributes:
      drafter: the family of ways, or the way.
      context: slots of the cache.
      plain_seconds: of a round without drafts.
      costs: of a round in plain steps, by its number of drafts.
    """

    drafter: str
    context: int
    plain_seconds: float
    costs: dict[int, float]


def cost_blocks(
    ways: Mapping[str, Mapping[str, Any]], costs: Mapping[str, RoundCosts]
) -> list[Block]:
    """Returns a chapter on what rounds cost; nothing where that was not measured.

    Args:
      ways: of the config, by label.
      costs: of single answers, by label.
    """
    lines = cost_lines(ways, costs)
    if not lines:
        return []
    points = {
        context: {one.drafter: one.costs for one in lines if one.context == context}
        for context in sorted({one.context for one in lines})
    }
    return [Heading("What a round costs"), _table(lines), cost_by_width(points)]


def cost_lines(
    ways: Mapping[str, Mapping[str, Any]], costs: Mapping[str, RoundCosts]
) -> list[CostLine]:
    """Returns a line a drafter and context: fixed numbers of one drafter are one line."""
    fixed = families(ways)
    in_families = {way for members in fixed.values() for way in members}
    groups = {name: list(members) for name, members in fixed.items()}
    for way in (way for way in ways if way not in in_families):
        groups[f"{way} (auto)" if way in groups else way] = [way]
    lines = []
    for name, members in groups.items():
        own = [costs[way] for way in members if way in costs and 0 in costs[way].numbers]
        contexts = sorted({context for one in own for context in one.contexts})
        for drafter in dict.fromkeys(drafter for one in own for drafter in one.drafters):
            is_only = all(len(one.drafters) == 1 for one in own)
            label = name if is_only else f"{name}: {drafter}"
            for context in contexts:
                known = [one for one in own if context in one.contexts and drafter in one.drafters]
                lines.append(_line(label, context, [_seconds(o, context, drafter) for o in known]))
    return lines


def _seconds(costs: RoundCosts, context: int, drafter: str) -> dict[int, float]:
    row = costs.seconds[costs.contexts.index(context)][costs.drafters.index(drafter)]
    return dict(zip(costs.numbers, row, strict=True))


def _line(label: str, context: int, measured: Sequence[Mapping[int, float]]) -> CostLine:
    """Returns a line of measurements, each in plain steps of its own."""
    costs = {count: seconds / own[0] for own in measured for count, seconds in own.items() if count}
    plain = sum(own[0] for own in measured) / len(measured)
    return CostLine(label, context, plain, {0: 1.0, **dict(sorted(costs.items()))})


def _table(lines: Sequence[CostLine]) -> Table:
    counts = sorted({count for one in lines for count in one.costs} - {0})
    is_cascade = any(": " in one.drafter for one in lines)
    members = (
        " Of a cascade each drafter has a line, for the rounds in which it drafts."
        if is_cascade
        else ""
    )
    rows = tuple(
        (
            code(one.drafter),
            str(one.context),
            number(1000 * one.plain_seconds, 1),
            *(number(one.costs[n]) if n in one.costs else NOTHING for n in counts),
        )
        for one in lines
    )
    return Table(
        "Cost of a round (plain steps), by the drafts in it",
        ("drafter", "context (tokens)", "plain step (ms)", *map(_drafts, counts)),
        rows,
        note="One answer at a time: drafting and the call that checks the drafts together, timed "
        "apart from the answers, where prompt and answer may have so many tokens together. A round "
        f"pays if it gives more tokens than it costs.{members}",
    )


def _drafts(count: int) -> str:
    return "1 draft" if count == 1 else f"{count} drafts"

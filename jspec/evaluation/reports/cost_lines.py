"""What rounds cost against their width, as it was measured apart from the answers."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jspec.common.counted import counted
from jspec.evaluation.reports.document import Block, Heading, Table
from jspec.evaluation.reports.families import families
from jspec.evaluation.reports.figures_costs import cost_by_width
from jspec.evaluation.reports.wording import NOTHING, code, number
from jspec.generation.costs import RoundCosts


class CostLine(NamedTuple):
    """What rounds of one drafter cost at one context.

    Attributes:
      drafter: the family of ways, or the way.
      context: slots of the cache.
      plain_seconds: of a round without drafts.
      costs: of a round in plain steps, by its number of drafts.
      reading: seconds for each token of the prompt, which its drafter reads before its first draft.
    """

    drafter: str
    context: int
    plain_seconds: float
    costs: dict[int, float]
    reading: float


def cost_blocks(
    methods: Mapping[str, Mapping[str, Any]], costs: Mapping[str, RoundCosts]
) -> list[Block]:
    """Returns a chapter on what rounds cost; nothing where that was not measured.

    Args:
      methods: of the config, by label.
      costs: of single answers, by label.
    """
    lines = cost_lines(methods, costs)
    if not lines:
        return []
    context = max(one.context for one in lines)
    points = {one.drafter: one.costs for one in lines if one.context == context}
    return [Heading("What a round costs"), _table(lines), cost_by_width(points, context)]


def cost_lines(
    methods: Mapping[str, Mapping[str, Any]], costs: Mapping[str, RoundCosts]
) -> list[CostLine]:
    """Returns a line a drafter and context: fixed numbers of one drafter are one line."""
    fixed = families(methods)
    in_families = {method for members in fixed.values() for method in members}
    groups = {name: list(members) for name, members in fixed.items()}
    for method in (method for method in methods if method not in in_families):
        groups[f"{method} (auto)" if method in groups else method] = [method]
    lines = []
    for name, members in groups.items():
        own = [
            costs[method] for method in members if method in costs and 0 in costs[method].numbers
        ]
        contexts = sorted({context for one in own for context in one.contexts})
        for drafter in dict.fromkeys(drafter for one in own for drafter in one.drafters):
            is_only = all(len(one.drafters) == 1 for one in own)
            label = name if is_only else f"{name}: {drafter}"
            for context in contexts:
                known = [one for one in own if context in one.contexts and drafter in one.drafters]
                lines.append(_line(label, context, drafter, known))
    return lines


def _line(label: str, context: int, drafter: str, known: Sequence[RoundCosts]) -> CostLine:
    """Returns a line of measurements, each in plain steps of its own."""
    measured, reading = [], []
    for own in known:
        place = own.contexts.index(context), own.drafters.index(drafter)
        measured.append(dict(zip(own.numbers, own.seconds[place[0]][place[1]], strict=True)))
        reading.append(own.reading[place[0]][place[1]] if own.reading else 0.0)
    costs = {count: seconds / own[0] for own in measured for count, seconds in own.items() if count}
    return CostLine(
        label,
        context,
        sum(own[0] for own in measured) / len(measured),
        {0: 1.0, **dict(sorted(costs.items()))},
        sum(reading) / len(reading),
    )


def _table(lines: Sequence[CostLine]) -> Table:
    counts = sorted({count for one in lines for count in one.costs} - {0})
    is_cascade = any(": " in one.drafter for one in lines)
    members = (
        " Of two drafters in one way (`a+b`) each has a line, for the rounds in which it drafts."
        if is_cascade
        else ""
    )
    has_reading = any(one.reading > 0 for one in lines)
    prompt = (
        " **Reading** is what a draft model takes for each token of the prompt, before it first "
        "drafts: it is in the cost of a round in answers, and not in this table's."
        if has_reading
        else ""
    )
    rows = tuple(
        (
            code(one.drafter),
            str(one.context),
            number(1000 * one.plain_seconds, 1),
            *(number(one.costs[n]) if n in one.costs else NOTHING for n in counts),
            *([_reading(one.reading)] if has_reading else []),
        )
        for one in lines
    )
    return Table(
        "Cost of a round (plain steps), by the drafts in it",
        (
            "drafter", "context (tokens)", "plain step (ms)",
            *(counted(count, "draft") for count in counts),
            *(["reading (ms a token)"] if has_reading else []),
        ),
        rows,
        note="One answer at a time: drafting and the call that checks the drafts together, timed "
        "apart from the answers, where prompt and answer may have so many tokens together. A round "
        f"pays if it gives more tokens than it costs.{prompt}{members}",
    )  # fmt: skip


def _reading(seconds: float) -> str:
    return number(1000 * seconds) if seconds else NOTHING

"""Costs of rounds, measured separately from the answers, and the speed-ups predicted from them.

The costs are those of a calibration (see `RoundCosts`): they do not use the answers that were
timed, so a wrong cost shows as an error of the prediction.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jspec.common.errors import InputError
from jspec.common.figures import Curves
from jspec.generation.costs import RoundCosts
from jspec.generation.result import RoundCounts
from jspec.generation.rows import capacity_for
from jspec.lab.analysis.ratios import alpha_of, tokens_by_position
from jspec.lab.analysis.theory import expected_tokens
from jspec.lab.reports.document import Block, Heading, Table, code, interval, number
from jspec.lab.reports.scene import Scene, Timed, TimedAnswer, answers_by_prompt, families
from jspec.lab.reports.workdir import View

Answers = Sequence[TimedAnswer]
_ABOUT_PREDICTIONS = (
    "From the acceptance in the same answers, and costs that were measured separately, at "
    "temperature 0: above it, drawing from a round's distributions comes on top. Theorem 3.8 "
    "(arXiv 2211.17192): one alpha, full proposals; each draft adds c plain steps, of which a part "
    "is the wider verify call's. By position: acceptance and cost of proposals of the real "
    "lengths, and a draft model's reading of the prompt."
)


def cost_lines(
    methods: Mapping[str, Mapping[str, Any]], costs: Mapping[str, RoundCosts]
) -> dict[tuple[str, int], dict[int, list[float]]]:
    """Returns costs of rounds by (drafter, context) and number of drafts, in plain steps.

    Methods that differ in the number alone are one line, each in its own plain steps. Under
    number 0 are the seconds of these plain steps, under -1 those of reading a token of the prompt.
    """
    name_of = {m: name for name, entry in families(methods).items() for m in entry}
    lines: dict[tuple[str, int], dict[int, list[float]]] = {}
    for method in (item for item in methods if item in costs and 0 in costs[item].numbers):
        entry = costs[method]
        for (i, context), (j, drafter) in itertools.product(
            enumerate(entry.contexts), enumerate(entry.drafters)
        ):
            label = name_of.get(method, method)
            label += f": {drafter}" if len(entry.drafters) > 1 else ""
            line = lines.setdefault((label, context), {})
            seconds = dict(zip(entry.numbers, entry.seconds[i][j], strict=True))
            line.setdefault(-1, []).append(entry.reading[i][j] if entry.reading else 0.0)
            line.setdefault(0, []).append(seconds[0])
            line |= {n: [item / seconds[0]] for n, item in seconds.items() if n}
    return lines


def cost_blocks(
    methods: Mapping[str, Mapping[str, Any]], costs: Mapping[str, RoundCosts], view: View
) -> list[Block]:
    """Returns a chapter on what rounds cost; nothing where that was not measured."""
    lines = cost_lines(methods, costs)
    if not lines:
        return []
    counts = sorted({count for line in lines.values() for count in line if count > 0})
    rows = [
        {
            "drafter": code(drafter),
            "context (tokens)": str(context),
            "plain step (ms)": number(1000 * float(np.mean(line[0])), 1),
            **{f"drafts: {n}": number(line[n][0] if n in line else None) for n in counts},
            "reading (ms a token)": number(1000 * float(np.mean(line[-1]))),
        }
        for (drafter, context), line in lines.items()
    ]
    by_context: dict[int, dict[str, list[float | None]]] = {}
    for (drafter, context), line in sorted(lines.items(), key=lambda item: item[0][1]):
        heights = [1.0, *(line[n][0] if n in line else None for n in counts)]
        by_context.setdefault(context, {})[drafter] = heights
    panels = [
        Curves([0, *counts], curves, "drafts in a round", "plain steps",
               title=f"up to {context} tokens", reference="plain decoding")
        for context, curves in by_context.items()
    ]  # fmt: skip
    note = "Reading: what a draft model takes for a token of the prompt before it first drafts."
    caption = "Measured separately from the answers, one value each: no spread is recorded."
    title = "Cost of a round (plain steps), by its drafts"
    figure = view.draw("cost-by-width", panels, title, caption, share_y=True)
    return [Heading("What a round costs"), Table(title, rows, note), figure]


def round_seconds(costs: RoundCosts, max_length: int, a_round: RoundCounts) -> float:
    """Returns the seconds of a round of one answer; of a plain step where nobody drafted.

    A round costs what the smallest calibrated number of drafts costs that is not less than its
    number. All tokens of prompt and answer, `max_length`, decide on the cache's size.

    Raises:
      InputError: such a round was not calibrated.
    """
    seconds = costs.at(capacity_for(max_length, costs.numbers[-1] + 1))
    if not a_round.num_proposed:
        return float(seconds[:, 0].min())
    if a_round.drafter not in costs.drafters or a_round.num_proposed > costs.numbers[-1]:
        raise InputError(
            f"expected costs of rounds with {a_round.num_proposed} drafts by "
            f"{a_round.drafter!r}, got {list(costs.numbers)} by {list(costs.drafters)}"
        )
    of_drafter = seconds[costs.drafters.index(a_round.drafter)]
    return float(of_drafter[np.searchsorted(costs.numbers, a_round.num_proposed)])


def predict_by_position(seen: Answers, costs: RoundCosts) -> float:
    """Returns the speed-up of answers like these, whose own seconds are not looked at."""
    reading = sum(_reading(answer, costs) for answer in seen)
    return tokens_by_position(_rounds(seen)) / _cost(seen, costs, reading)


def predict_iid(seen: Answers, costs: RoundCosts) -> tuple[float, float]:
    """Returns the speed-up by Theorem 3.8, and its c: what a draft adds to a round, in plain steps.

    Its number of drafts is the largest calibrated number. Where several drafters took turns, c is
    the mean over their rounds; a round without drafts is taken for a full one of whoever drafts
    most often.
    """
    most = costs.numbers[-1]
    drafters = [a_round.drafter for a_round in _rounds(seen) if a_round.drafter]
    usual = max(sorted(set(drafters)), key=drafters.count, default=costs.drafters[0])
    full = [
        answer._replace(
            rounds=tuple(RoundCounts(most, 0, r.drafter or usual) for r in answer.rounds)
        )
        for answer in seen
    ]
    steps = _cost(full, costs)
    return expected_tokens(alpha_of(_rounds(seen)), most) / steps, (steps - 1) / most


def _rounds(answers: Answers) -> list[RoundCounts]:
    return [a_round for answer in answers for a_round in answer.rounds]


def _cost(answers: Answers, costs: RoundCosts, reading: float = 0.0) -> float:
    """Returns the mean cost of the answers' rounds in plain steps."""
    pairs = [(answer.max_length, a_round) for answer in answers for a_round in answer.rounds]
    seconds = {pair: round_seconds(costs, *pair) for pair in set(pairs)}
    plain = {length: round_seconds(costs, length, RoundCounts(0, 0)) for length, _ in pairs}
    taken = sum(seconds[pair] for pair in pairs) + reading
    return taken / sum(plain[length] for length, _ in pairs)


def _reading(answer: TimedAnswer, costs: RoundCosts) -> float:
    drafters = {item.drafter for item in answer.rounds if item.num_proposed}
    seconds = costs.reading_at(capacity_for(answer.max_length, costs.numbers[-1] + 1))
    known = [item for name, item in zip(costs.drafters, seconds, strict=True) if name in drafters]
    return answer.num_prompt_tokens * float(sum(known))


def prediction_blocks(scenes: Sequence[Scene], costs: Mapping[str, RoundCosts]) -> list[Block]:
    """Returns a chapter on predicted and measured speed-ups; nothing where costs are not known."""
    tables = []
    for scene in scenes:
        is_right = scene.baseline_name == "plain decoding" and scene.batch_size == 1
        known = [method for method in scene.others if method in costs and is_right]
        groups = {"all": scene.numbers} | scene.by_category
        rows = [
            {"method": code(method), "prompts": name} | _prediction(group[method], costs[method])
            for method in known
            for name, group in groups.items()
            if group[method].speedup is not None
        ]
        caption = f"Predicted and measured speed-up ({scene.name})"
        tables += [Table(caption, rows)] if rows else []
    about = Heading("Predicted and measured"), _ABOUT_PREDICTIONS
    return [*about, *tables] if tables else []


def _prediction(timed: Timed, costs: RoundCosts) -> dict[str, str]:
    assert timed.speedup is not None
    shared = {cell.prompts for cell in timed.cells} & {cell.prompts for cell in timed.base}
    groups = answers_by_prompt([cell for cell in timed.cells if cell.prompts in shared])
    seen = [answer for group in groups for answer in group]
    iid, cost_ratio = predict_iid(seen, costs)
    row = {"alpha": number(alpha_of(_rounds(seen)), 3), "c": number(cost_ratio, 3),
           "measured": interval(timed.speedup)}  # fmt: skip
    forms = {"Theorem 3.8": iid, "by position": predict_by_position(seen, costs)}
    for form, predicted in forms.items():
        error = 100 * (predicted / timed.speedup.median - 1)
        row |= {form: number(predicted), f"{form}: error (%)": format(error, "+.0f")}
    return row

"""Speed-ups that were to be expected, beside those that were measured, and why they differ."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jspec.evaluation.reports.document import Block, Heading, Paragraph, Table
from jspec.evaluation.reports.measured import Cell
from jspec.evaluation.reports.prediction import (
    HalfPrediction,
    PromptRun,
    RoundSpeed,
    cost_of,
    expect_iid,
    predict_halves,
    reading_of,
)
from jspec.evaluation.reports.scene import Scene
from jspec.evaluation.reports.view import View
from jspec.evaluation.reports.wording import code, number
from jspec.generation.costs import RoundCosts

_FEWEST_PROMPTS = 4
_GAP = 0.1
_FORMS = {"iid": "i.i.d.", "by_position": "by position"}
_EXPECTED = (
    "For those who want the theory: what was to be expected of one half of the prompts from what "
    "was seen on the other. Left of each slash the prompts with even numbers, as expected from "
    "those with odd ones; right of it the other way round. What rounds cost was measured apart "
    "from all answers. **i.i.d.** (drafts that are independent and identically "
    "distributed): Theorem 3.8 of arXiv 2211.17192, every draft kept with the same probability "
    "alpha (of the drafts whose turn came), every proposal full, a draft adding **c** plain steps "
    "to a round, its share of the wider verify call included. **By position**: the acceptance at "
    "each place, the proposals' real lengths, the cost of rounds of that length, and of a draft "
    "model's reading of the prompt."
)
_EXPLAIN_GAPS = (
    "A speed-up is tokens of a round over its cost, in plain steps; an expectation is off because "
    "one of the two is. Tokens are off in the i.i.d. form where a drafter often has nothing to say "
    "or later drafts are kept more or less often than first ones, in the other form where the two "
    "halves of the prompts are not alike. Costs are off where proposals are shorter than the "
    "i.i.d. form takes them to be, and where the machine was slower or faster than when they were "
    "measured. The i.i.d. form leaves out that a draft model reads the prompt in its first round, "
    "and takes `auto` as a fixed number, its largest. Below, of each way the half that is further "
    "off."
)


class MethodPrediction(NamedTuple):
    """What was to be expected of a way.

    Attributes:
      method: its label.
      cost_ratio: c of the i.i.d. form, over all prompts.
      halves: each half of the prompts as the other had it expected.
    """

    method: str
    cost_ratio: float
    halves: Sequence[HalfPrediction]


def theory_chapter(
    scenes: Sequence[tuple[Scene, View]], costs: Mapping[str, RoundCosts]
) -> list[Block]:
    """Returns expected beside measured speed-ups of each way, and what gaps are made of.

    Args:
      scenes: in which something was measured, and what is said of each.
      costs: of the ways whose rounds were measured apart, by label; others are left out.

    Returns:
      The chapter; nothing where there is nothing to expect.
    """
    found = [
        (view, methods) for scene, view in scenes if (methods := _predict_methods(scene, costs))
    ]
    if not found:
        return []
    gaps = [table for view, methods in found if (table := _gaps_table(methods, view)).rows]
    return [
        Heading("Expected and measured speed-up"),
        Paragraph(_EXPECTED),
        *(_speedup_table(methods, view) for view, methods in found),
        *([Paragraph(_EXPLAIN_GAPS)] if gaps else []),
        *gaps,
    ]


def _predict_methods(scene: Scene, costs: Mapping[str, RoundCosts]) -> list[MethodPrediction]:
    """Returns what was to be expected of one answer at a time beside plain decoding, if any was."""
    if scene.base_name != "plain decoding" or scene.batch_size != 1:
        return []
    methods = []
    for method in scene.others:
        runs = prompt_runs(scene.cells[method], scene.cells[scene.base])
        if len(runs) >= _FEWEST_PROMPTS and method in costs:
            methods.append(_predict(method, runs, costs[method]))
    return methods


def prompt_runs(own: Sequence[Cell], base: Sequence[Cell]) -> list[PromptRun]:
    """Returns what each prompt took, over all repeats and seeds that both ways have."""
    by_place = {(cell.prompts, cell.seed, cell.repeat): cell for cell in base}
    pairs: dict[tuple[int, ...], list[tuple[Cell, Cell]]] = {}
    for cell in own:
        plain = by_place.get((cell.prompts, cell.seed, cell.repeat))
        if plain is not None:
            pairs.setdefault(cell.prompts, []).append((cell, plain))
    runs = [_prompt_run(both) for _, both in sorted(pairs.items())]
    return [run for run in runs if run.num_tokens and run.num_plain_tokens]


def _prompt_run(pairs: Sequence[tuple[Cell, Cell]]) -> PromptRun:
    own = [answer for cell, _ in pairs for answer in cell.answers]
    plain = [answer for _, cell in pairs for answer in cell.answers]
    return PromptRun(
        rounds=[a_round for answer in own for a_round in answer.rounds],
        num_tokens=sum(answer.num_round_tokens for answer in own),
        seconds=sum(answer.decode_seconds for answer in own),
        num_plain_tokens=sum(answer.num_round_tokens for answer in plain),
        plain_seconds=sum(answer.decode_seconds for answer in plain),
        max_length=max(answer.num_prompt_tokens + len(answer.token_ids) for answer in own),
        num_prompt_tokens=sum(answer.num_prompt_tokens for answer in own),
    )


def _predict(method: str, runs: Sequence[PromptRun], costs: RoundCosts) -> MethodPrediction:
    cost, most = cost_of(costs), costs.numbers[-1]
    _, cost_ratio = expect_iid(runs, cost, num_draft_tokens=most)
    halves = predict_halves(runs, cost, num_draft_tokens=most, reading=reading_of(costs))
    return MethodPrediction(method, cost_ratio, halves)


def _speedup_table(methods: Sequence[MethodPrediction], view: View) -> Table:
    rows = tuple(
        (
            code(one.method),
            _both([half.alpha for half in one.halves]),
            number(one.cost_ratio, 3),
            _both([half.measured.speedup for half in one.halves]),
            _both([half.iid.speedup for half in one.halves]),
            _percents([half.iid.error(half.measured) for half in one.halves]),
            _both([half.by_position.speedup for half in one.halves]),
            _percents([half.by_position.error(half.measured) for half in one.halves]),
        )
        for one in methods
    )
    return Table(
        f"Expected and measured speed-up ({view.where})",
        ("method", "alpha", "c", "measured", "i.i.d.", "its error (%)", "by position",
         "its error (%)"),
        rows,
    )  # fmt: skip


def _gaps_table(methods: Sequence[MethodPrediction], view: View) -> Table:
    """Returns where an expectation was off by over a tenth, and in which of its two parts."""
    rows = tuple(
        row
        for one in methods
        for name, form in _FORMS.items()
        if (row := _gap_row(one, name, form)) is not None
    )
    return Table(
        f"Gaps of over {100 * _GAP:.0f} % ({view.where})",
        ("method", "form", "error (%)", "tokens a round: expected", "measured",
         "cost of a round: expected", "measured", "mostly"),
        rows,
    )  # fmt: skip


def _gap_row(one: MethodPrediction, name: str, form: str) -> tuple[str, ...] | None:
    """Returns the row of the worse half; None if both are near."""
    halves = [(getattr(half, name), half.measured) for half in one.halves]
    expected, measured = max(halves, key=lambda pair: abs(pair[0].error(pair[1])))
    error = expected.error(measured)
    if abs(error) <= _GAP:
        return None
    return (
        code(one.method),
        form,
        _percents([error]),
        number(expected.tokens),
        number(measured.tokens),
        number(expected.cost),
        number(measured.cost),
        _mostly(expected, measured),
    )


def _mostly(expected: RoundSpeed, measured: RoundSpeed) -> str:
    """Returns which part of a speed-up is further off, on the side of the error."""
    tokens, cost = expected.tokens / measured.tokens, measured.cost / expected.cost
    if expected.speedup < measured.speedup:
        tokens, cost = 1 / tokens, 1 / cost
    return "tokens" if tokens > cost else "cost"


def _both(values: Sequence[float]) -> str:
    return " / ".join(map(number, values))


def _percents(errors: Sequence[float]) -> str:
    return " / ".join(f"{100 * error:+.0f}" for error in errors)

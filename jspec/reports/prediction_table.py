"""Speed-ups that theory expects, beside those that were measured."""

from collections.abc import Mapping, Sequence

from jspec.analysis.prediction import (
    HalfPrediction,
    PromptRun,
    fit_round_costs,
    plain_step_seconds,
    predict_halves,
)
from jspec.costs import RoundCosts
from jspec.reports.document import Table
from jspec.reports.measured import Cell
from jspec.reports.scene import Scene
from jspec.reports.view import View
from jspec.reports.wording import code, number

_AUTO_NUMBERS = (0, 1, 3, 7)
_FEWEST_PROMPTS = 4


def prediction_table(
    scene: Scene, view: View, costs: Mapping[str, RoundCosts] | None = None
) -> Table | None:
    """Returns expected beside measured speed-ups of each way; None with too few prompts for it.

    Args:
      scene: one answer at a time, the base plain decoding.
      view: of the scene.
      costs: measured apart from the answers, by way; not looked at yet.
    """
    del costs
    if scene.base_name != "plain decoding" or scene.batch_size != 1:
        return None
    rows = []
    for way in scene.others:
        runs = prompt_runs(scene.cells[way], scene.cells[scene.base])
        widths = _widths(scene.ways[way].get("num_draft_tokens"), runs)
        if len(runs) >= _FEWEST_PROMPTS and max(widths) > 0:
            rows.append((code(way), *_row(runs, widths)))
    if not rows:
        return None
    return Table(
        f"Expected and measured speed-up ({view.where}), each half of the prompts from the other",
        ("way", "alpha", "c", "measured", "i.i.d.", "its error (%)", "by position",
         "its error (%)"),
        tuple(rows),
        note="Left of the stroke the odd prompts, predicted from what was seen on the even ones; "
        "right of it the other way round. **i.i.d.**: Theorem 3.8 of arXiv 2211.17192, "
        "every draft kept with the same probability alpha (of the drafts "
        "whose turn came), every proposal full, a draft adding c plain steps. **By position**: the "
        "acceptance at each place, the proposals' real lengths, and the time of rounds by their "
        "width.",
    )  # fmt: skip


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
    )


def _widths(number: object, runs: Sequence[PromptRun]) -> list[int]:
    """Returns the widths at which verify calls were compiled, as far as the rounds tell."""
    proposed = {num_proposed for run in runs for num_proposed, *_ in run.rounds}
    if isinstance(number, int):
        return sorted({number, max(proposed, default=0)} | ({0} & proposed))
    return sorted({*_AUTO_NUMBERS, *proposed} if max(proposed, default=0) > 7 else _AUTO_NUMBERS)


def _row(runs: Sequence[PromptRun], widths: Sequence[int]) -> tuple[str, ...]:
    number_of_drafts = max(widths)
    num_rounds = sum(len(run.rounds) for run in runs)
    cost = sum(run.seconds for run in runs) / num_rounds / plain_step_seconds(runs)
    cost_ratio = max((cost - 1) / number_of_drafts, 0.0)
    halves = predict_halves(
        runs,
        num_draft_tokens=number_of_drafts,
        cost_ratio=cost_ratio,
        costs=lambda seen: fit_round_costs(seen, widths),
    )
    return (
        _both(halves, "alpha"),
        number(cost_ratio, 3),
        _both(halves, "measured"),
        _both(halves, "iid"),
        _errors(halves, "iid_error"),
        _both(halves, "by_position"),
        _errors(halves, "by_position_error"),
    )


def _both(halves: Sequence[HalfPrediction], name: str) -> str:
    return " / ".join(number(getattr(half, name)) for half in halves)


def _errors(halves: Sequence[HalfPrediction], name: str) -> str:
    return " / ".join(f"{100 * getattr(half, name):+.0f}" for half in halves)

"""The numbers of one method of generating: how fast, how often drafts are kept, what a round
costs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jspec.evaluation.analysis.intervals import mean_and_interval
from jspec.evaluation.analysis.ratios import Ratio
from jspec.evaluation.reports.measured import Cell, all_rounds, distinct_answers
from jspec.evaluation.reports.speeds import calls, compare, decoding, speed, whole
from jspec.generation.stats import RoundCounts


class MethodNumbers(NamedTuple):
    """What was measured of one way, beside the base that was timed in turn with it.

    Attributes:
      method: its label.
      num_prompts: prompts (or batches of them) that the speed-up rests on.
      num_repeats: times that each was timed.
      num_tokens: tokens of all answers, repeats not counted again.
      tokens_per_second: of decoding with one answer at a time, of everything in a batch.
      speedup: to the base, likewise.
      whole_speedup: to the base in the time of whole answers, reading the prompt included; None
        where it was not asked for.
      acceptance: share of the drafts that are kept, its interval over prompts; None without drafts.
      alpha: share of the drafts whose turn came that are kept, likewise; see `observed_alpha`.
      tokens_per_call: tokens that a target call gives.
      proposed_per_round: drafts.
      kept_per_round: drafts.
      cost: time of a round of one answer, in rounds of the base; None in a batch.
      seconds_per_round: on the device, with one answer at a time; None in a batch.
      same_answers: answers that are token for token those of the base, and all that were compared.
    """

    method: str
    num_prompts: int
    num_repeats: int
    num_tokens: int
    tokens_per_second: float | None
    speedup: Ratio | None
    whole_speedup: Ratio | None
    acceptance: Ratio | None
    alpha: Ratio | None
    tokens_per_call: float | None
    proposed_per_round: float | None
    kept_per_round: float | None
    cost: float | None
    seconds_per_round: float | None
    same_answers: tuple[int, int]

    @property
    def is_timed_once(self) -> bool:
        """Whether nothing is known of how much its speed-up varies."""
        return self.num_prompts * self.num_repeats <= 1


def method_numbers(
    method: str, own: Sequence[Cell], base: Sequence[Cell], *, has_whole: bool = True
) -> MethodNumbers:
    """Returns the numbers of a way.

    Args:
      method: its label.
      own: its cells at one setting and batch size.
      base: those of the base, likewise.
      has_whole: whether the speed-up of whole answers is wanted; its interval takes time.
    """
    answers = distinct_answers(own)
    rounds = all_rounds(answers)
    num_round_tokens = sum(answer.num_round_tokens for group in answers for answer in group)
    is_single = all(cell.batch_size == 1 for cell in own)
    clock = decoding if is_single else whole
    faster = compare(own, base, clock)
    whole_faster = compare(own, base, whole) if has_whole else None
    more_calls = compare(own, base, calls, num_samples=1) if is_single else None
    return MethodNumbers(
        method=method,
        num_prompts=faster.num_prompts if faster else 0,
        num_repeats=faster.num_repeats if faster else 0,
        num_tokens=sum(len(answer.token_ids) for group in answers for answer in group),
        tokens_per_second=speed(own, clock),
        speedup=faster and faster.ratio,
        whole_speedup=whole_faster and whole_faster.ratio,
        acceptance=acceptance([all_rounds([group]) for group in answers]),
        alpha=observed_alpha([all_rounds([group]) for group in answers]),
        tokens_per_call=num_round_tokens / len(rounds) if rounds else None,
        proposed_per_round=_mean([r.num_proposed for r in rounds]),
        kept_per_round=_mean([r.num_accepted for r in rounds]),
        cost=1 / more_calls.ratio.median if more_calls else None,
        seconds_per_round=_seconds_per_round(own) if is_single else None,
        same_answers=_same_answers(own, base),
    )


def acceptance(rounds_by_prompt: Sequence[Sequence[RoundCounts]]) -> Ratio | None:
    """Returns the share of drafts that are kept, with its bootstrap interval over prompts.

    Args:
      rounds_by_prompt: the rounds of each prompt's answers.
    """
    counts = [
        (sum(r.num_accepted for r in rounds), sum(r.num_proposed for r in rounds))
        for rounds in rounds_by_prompt
    ]
    return _share_or_none(counts)


def observed_alpha(rounds_by_prompt: Sequence[Sequence[RoundCounts]]) -> Ratio | None:
    """Returns the drafts kept of those whose turn came, with its bootstrap interval over prompts.

    The same as `jspec.evaluation.reports.prediction.observed_alpha`: a draft behind a refused one
    had none.

    Args:
      rounds_by_prompt: the rounds of each prompt's answers.
    """
    counts = [
        (
            sum(r.num_accepted for r in rounds),
            sum(min(r.num_accepted + 1, r.num_proposed) for r in rounds),
        )
        for rounds in rounds_by_prompt
    ]
    return _share_or_none(counts)


def acceptance_by_place(
    rounds_by_prompt: Sequence[Sequence[RoundCounts]], *, is_conditional: bool
) -> list[Ratio]:
    """Returns how often the draft at each place is kept, with bootstrap intervals over prompts.

    Args:
      rounds_by_prompt: the rounds of each prompt's answers.
      is_conditional: whether those rounds alone count in which all drafts before it were kept.

    Returns:
      As many as there are places that a round reached; see `jspec.generation.stats`.
    """
    rates: list[Ratio] = []
    while True:
        place = len(rates)
        reached = [
            [
                r.num_accepted > place
                for r in rounds
                if r.num_proposed > place and (r.num_accepted >= place or not is_conditional)
            ]
            for rounds in rounds_by_prompt
        ]
        rate = _share_or_none([(sum(own), len(own)) for own in reached])
        if rate is None:
            return rates
        rates.append(rate)


def _share_or_none(counts: Sequence[tuple[float, float]]) -> Ratio | None:
    counts = [pair for pair in counts if pair[1] > 0]
    return share(counts) if counts else None


def share(counts: Sequence[tuple[float, float]]) -> Ratio:
    """Returns the ratio of two totals, with its bootstrap interval over what they are summed over.

    Args:
      counts: part and whole of each; wholes above 0.
    """
    parts, wholes = np.array(counts).T
    return Ratio(*mean_and_interval(parts, wholes))


def _mean(values: Sequence[int]) -> float | None:
    return float(np.mean(values)) if values else None


def _seconds_per_round(cells: Sequence[Cell]) -> float | None:
    answers = [answer for cell in cells for answer in cell.answers]
    num_rounds = sum(len(answer.rounds) for answer in answers)
    return sum(answer.device_seconds for answer in answers) / num_rounds if num_rounds else None


def _same_answers(own: Sequence[Cell], base: Sequence[Cell]) -> tuple[int, int]:
    """Returns how many answers of the first repeats equal the base's, of how many."""
    said = {
        (cell.prompts, cell.seed): [answer.token_ids for answer in cell.answers] for cell in base
    }
    pairs = {
        (cell.prompts, cell.seed): [answer.token_ids for answer in cell.answers] for cell in own
    }
    shared = said.keys() & pairs.keys()
    both = [
        ours == theirs
        for place in shared
        for ours, theirs in zip(pairs[place], said[place], strict=False)
    ]
    return sum(both), len(both)

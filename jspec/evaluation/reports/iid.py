"""The i.i.d. model of a drafter, fitted to what was measured: the theory line of a figure."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jspec.evaluation.analysis.improvement import walltime_improvement
from jspec.generation.stats import RoundCounts


class IidModel(NamedTuple):
    """Theorem 3.8 of Leviathan et al. (arXiv 2211.17192) with measured numbers.

    Attributes:
      fitted_alpha: probability that a next draft is there and kept, once those before it are. What
        a drafter does not propose counts against it, so that it is below
        `jspec.evaluation.reports.prediction.observed_alpha` wherever proposals are not full.
      cost_ratio: what one more draft adds to a round, its share of a wider verify call included,
        in steps of plain decoding.
    """

    fitted_alpha: float
    cost_ratio: float

    def speedup(self, num_draft_tokens: int) -> float:
        """Returns the speed-up to expect of that many drafts a round."""
        return walltime_improvement(self.fitted_alpha, num_draft_tokens, self.cost_ratio)


def fit(
    rounds: Mapping[int, Sequence[RoundCounts]], costs: Mapping[int, float | None]
) -> IidModel | None:
    """Returns the model of one drafter.

    A draft that the drafter did not propose counts as one that was not kept, so that it is the
    maximum-likelihood estimate of a geometric distribution cut off at the number of drafts: kept
    drafts over those and the rounds that did not keep all.

    Args:
      rounds: what was observed, by number of drafts a round.
      costs: time of a round in steps of plain decoding, likewise; None where it is not known.

    Returns:
      The model; None without rounds or costs.
    """
    num_kept = sum(r.num_accepted for own in rounds.values() for r in own)
    num_ended = sum(r.num_accepted < number for number, own in rounds.items() for r in own)
    known = [(number, cost) for number, cost in costs.items() if cost is not None]
    if not num_kept + num_ended or not known:
        return None
    # Least squares of cost = 1 + c · number.
    slope = sum(number * (cost - 1) for number, cost in known)
    slope /= sum(number * number for number, _ in known)
    return IidModel(num_kept / (num_kept + num_ended), max(slope, 0.0))

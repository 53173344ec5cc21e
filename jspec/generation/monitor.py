"""Running acceptance by category of request, and what it recommends."""

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

from jspec.generation.costs import RoundCosts
from jspec.generation.request import Result
from jspec.generation.stats import RoundCounts, acceptance_rate, conditional_acceptance

_LEAST_ROUNDS = 20
_CONTEXT = 512
_WORTH = 1.02  # a speed-up below this is not worth a second program


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """What drafting does for one category.

    Attributes:
      category: of the requests.
      num_rounds: looked at.
      acceptance_rate: drafts kept of those proposed; None where none were.
      num_draft_tokens: the best number of the proposals seen; 0 is off; None while too little has
        been seen, or where it is not known what rounds cost.
      speedup: expected with it over plain decoding; None likewise.
    """

    category: str
    num_rounds: int
    acceptance_rate: float | None
    num_draft_tokens: int | None
    speedup: float | None

    def __str__(self) -> str:
        rate = self.acceptance_rate
        kept = "no drafts" if rate is None else f"{rate:.0%} of drafts kept"
        text = f"{self.category}: {kept} in {self.num_rounds} rounds"
        if self.num_draft_tokens is None or self.speedup is None:
            return text
        if self.num_draft_tokens == 0:
            return f"{text}; off: drafting does not pay"
        return f"{text}; {self.num_draft_tokens} drafts a round, about {self.speedup:.2f}x plain"


class AcceptanceMonitor:
    """Collects answers; `add` is a callback for a Generator's `on_result`.

    The expected speed-up of n drafts is Theorem 3.8 of Leviathan et al. (arXiv 2211.17192) with the
    measured acceptance of each place and measured costs: a round in which nobody has anything to
    propose counts as it was, and a draft model's reading of the prompts counts too. It speaks of
    the rounds that it saw: "auto" chooses those whose drafts are likely to be kept; a fixed number
    shows all.
    """

    def __init__(self) -> None:
        self._rounds: dict[str, list[RoundCounts]] = {}
        self._num_prompt_tokens: collections.Counter[str] = collections.Counter()

    def add(self, result: Result) -> None:
        """Counts one answer's rounds."""
        category = result.category or "all"
        self._rounds.setdefault(category, []).extend(result.stats.rounds)
        self._num_prompt_tokens[category] += len(result.prompt_token_ids)

    def recommend(self, costs: RoundCosts | None = None) -> list[Recommendation]:
        """Returns a recommendation for each category, in the order of their first answers.

        Args:
          costs: what rounds cost (`Generator.costs`); without them there is no number.
        """
        return [
            _recommend(name, rounds, self._num_prompt_tokens[name], costs)
            for name, rounds in self._rounds.items()
        ]

    def to_json(self, costs: RoundCosts | None = None) -> list[dict[str, Any]]:
        """Returns the recommendations as plain values."""
        return [dataclasses.asdict(one) for one in self.recommend(costs)]


def _recommend(
    category: str, rounds: list[RoundCounts], num_prompt_tokens: int, costs: RoundCosts | None
) -> Recommendation:
    number, speedup = None, None
    if costs is not None and len(rounds) >= _LEAST_ROUNDS:
        number, speedup = _best_number(rounds, num_prompt_tokens, costs)
    return Recommendation(category, len(rounds), acceptance_rate(rounds), number, speedup)


def _best_number(
    rounds: list[RoundCounts], num_prompt_tokens: int, costs: RoundCosts
) -> tuple[int, float]:
    """Returns the number of drafts with the highest expected speed, and that over plain."""
    seconds = costs.at(_CONTEXT).max(axis=0)  # of the dearest drafter
    reading = float(costs.reading_at(_CONTEXT).max()) * num_prompt_tokens
    num_tokens = sum(1 + r.num_accepted for r in rounds)
    share = sum(r.num_proposed > 0 for r in rounds) / len(rounds)
    rates = conditional_acceptance(rounds)
    speeds = {}
    for number, cost in zip(costs.numbers, seconds, strict=True):
        tokens = 1 + share * _expected(rates[:number])
        a_round = (1 - share) * seconds[0] + share * cost
        time = num_tokens / tokens * a_round + (reading if number else 0.0)
        speeds[number] = float(num_tokens * seconds[0] / time) if number <= len(rates) else 0.0
    best = max(speeds, key=lambda number: speeds[number])
    return (best, speeds[best]) if speeds[best] >= _WORTH else (0, 1.0)


def _expected(rates: Iterable[float]) -> float:
    """Returns how many drafts are kept on average: the sum of the products of their beginnings."""
    total, reached = 0.0, 1.0
    for rate in rates:
        reached *= rate
        total += reached
    return total

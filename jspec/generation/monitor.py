"""Acceptance rates by category of request, and the number of drafts that they recommend."""

import collections
from typing import NamedTuple

import numpy as np

from jspec.generation.costs import RoundCosts
from jspec.generation.result import Result, RoundCounts, acceptance_by_position, acceptance_rate

_MIN_ROUNDS = 20  # fewer rounds of a category recommend nothing
_CONTEXT = 512  # slots, for which costs are looked up
_MIN_SPEEDUP = 1.02  # less is not worth a second program


class Recommendation(NamedTuple):
    """What drafting does for one category of requests.

    Attributes:
      category: name of the category.
      num_rounds: number of rounds seen.
      acceptance_rate: accepted drafts divided by proposed drafts; None if none were proposed.
      num_draft_tokens: the best number of drafts a round; 0 means plain decoding. None while too
        few rounds were seen, or if the costs of rounds are not known.
      speedup: expected speed-up over plain decoding with that number; None likewise.
    """

    category: str
    num_rounds: int
    acceptance_rate: float | None
    num_draft_tokens: int | None
    speedup: float | None

    def __str__(self) -> str:
        rate = self.acceptance_rate
        accepted = "no drafts" if rate is None else f"{rate:.0%} of drafts accepted"
        text = f"{self.category}: {accepted} in {self.num_rounds} rounds"
        if self.num_draft_tokens is None or self.speedup is None:
            return text
        if self.num_draft_tokens == 0:
            return f"{text}; off: drafting does not pay"
        unit = "draft" if self.num_draft_tokens == 1 else "drafts"
        return f"{text}; {self.num_draft_tokens} {unit} a round, about {self.speedup:.2f}x plain"


class AcceptanceMonitor:
    """Collects answers; give each result to `add`.

    The expected speed-up of n drafts follows Theorem 3.8 of Leviathan et al. (arXiv 2211.17192),
    with the measured acceptance rate of each position and measured costs. Rounds without a proposal
    count as plain steps, and a draft model's reading of the prompts is included. The estimate is
    about the rounds that were seen: "auto" drafts where acceptance is likely, whereas a fixed
    number of drafts shows all rounds.
    """

    def __init__(self) -> None:
        self._rounds = collections.defaultdict[str, list[RoundCounts]](list)
        self._num_prompt_tokens: collections.Counter[str] = collections.Counter()

    def add(self, result: Result) -> None:
        """Adds the rounds of one answer."""
        category = result.category or "all"
        self._rounds[category].extend(result.stats.rounds)
        self._num_prompt_tokens[category] += len(result.prompt_token_ids)

    def recommend(self, costs: RoundCosts | None = None) -> list[Recommendation]:
        """Returns a recommendation for each category, in the order of their first answers.

        Without costs of rounds (`Generator.costs`) no number is recommended.
        """
        recommendations = []
        for category, rounds in self._rounds.items():
            number = speedup = None
            if costs is not None and len(rounds) >= _MIN_ROUNDS:
                number, speedup = _best_number(rounds, self._num_prompt_tokens[category], costs)
            rate = acceptance_rate(rounds)
            recommendations.append(Recommendation(category, len(rounds), rate, number, speedup))
        return recommendations


def _best_number(
    rounds: list[RoundCounts], num_prompt_tokens: int, costs: RoundCosts
) -> tuple[int, float]:
    """Returns the number of drafts with the highest expected speed-up, and that speed-up."""
    seconds = costs.at(_CONTEXT).max(axis=0)  # of the most expensive drafter
    reading = float(costs.reading_at(_CONTEXT).max()) * num_prompt_tokens
    num_tokens = sum(1 + r.num_accepted for r in rounds)
    share = sum(r.num_proposed > 0 for r in rounds) / len(rounds)
    rates = acceptance_by_position(rounds, is_conditional=True)
    speeds = {}
    for number, cost in zip(costs.numbers, seconds, strict=True):
        tokens = 1 + share * float(np.cumprod(rates[:number]).sum())
        a_round = (1 - share) * seconds[0] + share * cost
        time = num_tokens / tokens * a_round + (reading if number else 0.0)
        speeds[number] = float(num_tokens * seconds[0] / time) if number <= len(rates) else 0.0
    best = max(speeds, key=lambda number: speeds[number])
    return (best, speeds[best]) if speeds[best] >= _MIN_SPEEDUP else (0, 1.0)

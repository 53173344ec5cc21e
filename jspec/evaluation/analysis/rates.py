"""How often drafts were accepted, with bootstrap intervals over prompts.

Rounds are (drafts proposed, drafts accepted, drafter); see `jspec.generation.stats.RoundCounts`.
"""

from collections.abc import Sequence

import numpy as np

from jspec.evaluation.analysis.ratios import Ratio, mean_and_interval

Rounds = Sequence[tuple[int, int, str]]
PromptRounds = Sequence[Rounds]  # of each prompt's answers


def acceptance(rounds: PromptRounds) -> Ratio | None:
    """Returns the share of the proposed drafts that are accepted; None without drafts."""
    accepted = [sum(n for _, n, _ in own) for own in rounds]
    return share(accepted, [sum(proposed for proposed, _, _ in own) for own in rounds])


def observed_alpha(rounds: PromptRounds) -> Ratio | None:
    """Returns the share of the examined drafts that are accepted; None without drafts.

    A draft after a rejected one is not examined. So this, the alpha of Leviathan et al. (arXiv
    2211.17192) as rounds show it, does not fall with the number of drafts, as `acceptance` does.
    """
    accepted = [sum(n for _, n, _ in own) for own in rounds]
    return share(accepted, list(map(_num_examined, rounds)))


def alpha_of(rounds: Rounds) -> float:
    """Returns the share of the examined drafts that are accepted, 0 where nothing was proposed."""
    return sum(accepted for _, accepted, _ in rounds) / max(_num_examined(rounds), 1)


def _num_examined(rounds: Rounds) -> int:
    return sum(min(accepted + 1, proposed) for proposed, accepted, _ in rounds)


def acceptance_by_position(rounds: PromptRounds, *, is_conditional: bool) -> list[Ratio]:
    """Returns how often the draft at each position that some round reached is accepted.

    Args:
      rounds: of each prompt's answers.
      is_conditional: whether those rounds alone count in which all drafts before it were accepted.
    """
    rates: list[Ratio] = []
    for place in range(max((proposed for own in rounds for proposed, _, _ in own), default=0)):
        least = place if is_conditional else 0
        reached = [
            [n > place for proposed, n, _ in own if proposed > place and n >= least]
            for own in rounds
        ]
        if (rate := share(list(map(sum, reached)), list(map(len, reached)))) is None:
            break
        rates.append(rate)
    return rates


def tokens_by_position(rounds: Rounds) -> float:
    """Returns the tokens to expect of a round like these.

        sum over k of P(k) · (1 + sum over i <= k of a_1 · ... · a_i)

    with P(k) the share of rounds with k drafts proposed and a_i the acceptance at position i, given
    that all drafts before it were accepted: as if the length of a proposal said nothing about its
    quality. Theorem 3.8 of arXiv 2211.17192 has one alpha and one k instead.
    """
    reach, tokens_of = 1.0, [1.0]  # probability that all drafts so far are accepted; by k
    for place in range(max(proposed for proposed, _, _ in rounds)):
        reached = [n > place for proposed, n, _ in rounds if proposed > place and n >= place]
        reach *= sum(reached) / max(len(reached), 1)  # a position never examined adds nothing
        tokens_of.append(tokens_of[-1] + reach)
    return sum(tokens_of[proposed] for proposed, _, _ in rounds) / len(rounds)


def shares_by_accepted(rounds: PromptRounds, most: int) -> list[Ratio | None]:
    """Returns the shares of the rounds that accept 0, 1, ... `most` drafts."""
    counts = [[accepted for _, accepted, _ in own] for own in rounds]
    sizes = list(map(len, counts))
    return [share([own.count(n) for own in counts], sizes) for n in range(most + 1)]


def share(parts: Sequence[float], wholes: Sequence[float]) -> Ratio | None:
    """Returns the ratio of two totals over prompts, with its interval; None if all wholes are 0.

    Prompts whose whole is 0 are left out.
    """
    known = np.array(wholes) > 0
    if not known.any():
        return None
    return Ratio(*mean_and_interval(np.array(parts)[known], np.array(wholes)[known]))

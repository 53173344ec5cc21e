"""Ratios of speeds and of drafts, with bootstrap intervals: prompts are drawn with replacement.

Tokens of one answer are not independent of each other; answers to different prompts are. An
interval is from the 2.5th to the 97.5th percentile of 2,000 samples, drawn by a fixed seed.

Rounds are (drafts proposed, drafts accepted, drafter); see `jspec.generation.result.RoundCounts`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Shaped

Rounds = Sequence[tuple[int, int, str]]
PromptRounds = Sequence[Rounds]  # of each prompt's answers
_NUM_SAMPLES = 2000
_PERCENTILES = 2.5, 97.5


class Ratio(NamedTuple):
    """A ratio, or its median over repeats, with the 95 % interval over prompts and repeats."""

    median: float
    low: float
    high: float


def mean_and_interval(sums: Shaped[np.ndarray, "p"], counts: Shaped[np.ndarray, "p"]) -> Ratio:
    """Returns the ratio of two totals over prompts, such as drafts accepted over drafts proposed.

    Where all counts that are drawn are 0, the ratio counts as 0.
    """
    picks = np.random.default_rng(0).integers(len(sums), size=[_NUM_SAMPLES, len(sums)])
    ratios = sums[picks].sum(axis=1) / np.maximum(counts[picks].sum(axis=1), 1)
    value = sums.sum() / np.maximum(counts.sum(), 1)
    return Ratio(float(value), *np.percentile(ratios, _PERCENTILES).tolist())


def shares_by_accepted(rounds: PromptRounds, most: int) -> list[Ratio | None]:
    """Returns the shares of the rounds that accept 0, 1, ... `most` drafts."""
    counts = [[accepted for _, accepted, _ in prompt] for prompt in rounds]
    sizes = list(map(len, counts))
    return [share([prompt.count(n) for prompt in counts], sizes) for n in range(most + 1)]


def share(parts: Sequence[float], wholes: Sequence[float]) -> Ratio | None:
    """Returns the ratio of two totals over prompts, with its interval; None if all wholes are 0.

    Prompts whose whole is 0 are left out.
    """
    known = np.array(wholes) > 0
    if not known.any():
        return None
    return mean_and_interval(np.array(parts)[known], np.array(wholes)[known])


def speed_ratio(
    seconds: Float[np.ndarray, "r p"],
    tokens: Float[np.ndarray, "r p"],
    base_seconds: Float[np.ndarray, "r p"],
    base_tokens: Float[np.ndarray, "r p"],
) -> Ratio:
    """Returns how many times faster one method of generating is than another.

    Speed is all tokens over all seconds of a repeat (r), taken over the same prompts (p) on both
    sides; the ratio is the median over repeats. Samples of prompts that took no time, whose answers
    ended with their first token, are left out.
    """
    num_repeats, num_prompts = seconds.shape
    rng = np.random.default_rng(0)
    picks = [(np.arange(num_repeats), np.arange(num_prompts))]  # everything, and then the samples
    picks += [
        (rng.integers(num_repeats, size=num_repeats), rng.integers(num_prompts, size=num_prompts))
        for _ in range(_NUM_SAMPLES)
    ]
    repeats = np.stack([repeat for repeat, _ in picks], axis=1)
    # How often each sample has each prompt, [p s]: sums over its prompts are products with it.
    counts = [np.bincount(prompt, minlength=num_prompts) for _, prompt in picks]
    weights = np.stack(counts, axis=1)
    with np.errstate(invalid="ignore"):  # a sample of empty answers alone has no speed
        speeds = (tokens @ weights) / (seconds @ weights)
        base_speeds = (base_tokens @ weights) / (base_seconds @ weights)
        ratios = np.take_along_axis(speeds / base_speeds, repeats, axis=0)
    whole, *samples = np.median(ratios, axis=0).tolist()
    known = [sample for sample in samples if not np.isnan(sample)] or [np.nan]
    return Ratio(whole, *np.percentile(known, _PERCENTILES).tolist())


Amounts = Mapping[tuple[int, Any], tuple[float, float]]  # seconds and amount, by repeat and prompt


def compare_amounts(amounts: Amounts, base: Amounts) -> tuple[Ratio | None, int, int]:
    """Returns how many times more a second `amounts` have than `base`, over the prompts and repeats
    that both have done, and their numbers; None where they share nothing that took time.

    A run that is not over has begun a repeat: it counts if that leaves more than without it.
    """
    common = amounts.keys() & base.keys()
    shared = {place for place in common if min(*amounts[place], *base[place]) > 0}
    repeats = sorted({repeat for repeat, _ in shared})
    best: tuple[list[int], list[Any]] = [], []
    for count in range(1, len(repeats) + 1):
        of_each = [{prompt for r, prompt in shared if r == repeat} for repeat in repeats[:count]]
        prompts = sorted(set.intersection(*of_each))
        if count * len(prompts) >= len(best[0]) * len(best[1]):
            best = repeats[:count], prompts
    leaves = [
        np.array([[side[repeat, prompt][leaf] for prompt in best[1]] for repeat in best[0]])
        for side in (amounts, base)
        for leaf in (0, 1)
    ]
    return speed_ratio(*leaves) if best[1] else None, len(best[1]), len(best[0])


def acceptance(rounds: PromptRounds) -> Ratio | None:
    """Returns the share of the proposed drafts that are accepted; None without drafts."""
    accepted = [sum(n for _, n, _ in prompt) for prompt in rounds]
    return share(accepted, [sum(proposed for proposed, _, _ in prompt) for prompt in rounds])


def observed_alpha(rounds: PromptRounds) -> Ratio | None:
    """Returns the share of the examined drafts that are accepted; None without drafts.

    A draft after a rejected one is not examined. So this, the alpha of Leviathan et al. (arXiv
    2211.17192) as rounds show it, does not fall with the number of drafts, as `acceptance` does.
    """
    accepted = [sum(n for _, n, _ in prompt) for prompt in rounds]
    return share(accepted, list(map(_num_examined, rounds)))


def alpha_of(rounds: Rounds) -> float:
    """Returns the share of the examined drafts that are accepted, 0 where nothing was proposed."""
    return sum(accepted for _, accepted, _ in rounds) / max(_num_examined(rounds), 1)


def _num_examined(rounds: Rounds) -> int:
    return sum(min(accepted + 1, proposed) for proposed, accepted, _ in rounds)


def acceptance_by_position(rounds: PromptRounds, *, is_conditional: bool) -> list[Ratio]:
    """Returns how often the draft at each position that some round reached is accepted.

    Conditional: among the rounds alone in which all drafts before it were accepted.
    """
    rates: list[Ratio] = []
    for place in range(
        max((proposed for prompt in rounds for proposed, _, _ in prompt), default=0)
    ):
        least = place if is_conditional else 0
        reached = [
            [n > place for proposed, n, _ in prompt if proposed > place and n >= least]
            for prompt in rounds
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

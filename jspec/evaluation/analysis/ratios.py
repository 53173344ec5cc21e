"""Ratios of speeds that were measured side by side."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float


class Ratio(NamedTuple):
    """A ratio with its bootstrap interval.

    Attributes:
      median: over the repeats.
      low: 2.5th percentile over resampled prompts and repeats.
      high: 97.5th percentile.
    """

    median: float
    low: float
    high: float


def speed_ratio(
    seconds: Float[np.ndarray, "r p"],
    tokens: Float[np.ndarray, "r p"],
    base_seconds: Float[np.ndarray, "r p"],
    base_tokens: Float[np.ndarray, "r p"],
    *,
    num_samples: int = 2000,
    seed: int = 0,
) -> Ratio:
    """Returns how many times faster one method of generating is than another.

    Speed is all tokens over all seconds of a repeat (r), taken over the same prompts (p) on both
    sides; the ratio is the median over repeats. The interval resamples prompts and repeats; samples
    of prompts that took no time, whose answers ended with their first token, are left out.

    Args:
      seconds: of each repeat and prompt.
      tokens: likewise.
      base_seconds: of the way that is compared with.
      base_tokens: likewise.
      num_samples: bootstrap samples.
      seed: of the resampling.
    """

    num_repeats, num_prompts = seconds.shape
    rng = np.random.default_rng(seed)
    picks = [
        (rng.integers(num_repeats, size=num_repeats), rng.integers(num_prompts, size=num_prompts))
        for _ in range(num_samples)
    ]
    everything = np.arange(num_repeats), np.arange(num_prompts)
    repeats = np.stack([repeat for repeat, _ in [everything, *picks]], axis=1)
    # How often each sample has each prompt, [p s]: sums over its prompts are products with it.
    weights = np.stack(
        [np.bincount(prompt, minlength=num_prompts) for _, prompt in [everything, *picks]], axis=1
    )
    with np.errstate(invalid="ignore"):  # a sample of empty answers alone has no speed
        speeds = (tokens @ weights) / (seconds @ weights)
        base_speeds = (base_tokens @ weights) / (base_seconds @ weights)
        ratios = np.take_along_axis(speeds / base_speeds, repeats, axis=0)
    whole, *samples = np.median(ratios, axis=0).tolist()
    known = [sample for sample in samples if not np.isnan(sample)] or [np.nan]
    low, high = np.percentile(known, [2.5, 97.5])
    return Ratio(whole, float(low), float(high))


Amounts = Mapping[tuple[int, Any], tuple[float, float]]  # seconds and amount, by repeat and prompt


def compare_amounts(own: Amounts, base: Amounts) -> tuple[Ratio | None, int, int]:
    """Returns how many times more a second `own` has than `base`, over what both have done.

    A run that is not over has begun a repeat: it counts if that leaves more than without it.

    Returns:
      The ratio, None where they share nothing that took time; the prompts and the repeats.
    """
    both = own.keys() & base.keys()
    shared = {place for place in both if min(*own[place], *base[place]) > 0}
    repeats = sorted({repeat for repeat, _ in shared})
    best: tuple[list[int], list[Any]] = [], []
    for count in range(1, len(repeats) + 1):
        of_each = [{prompt for r, prompt in shared if r == repeat} for repeat in repeats[:count]]
        prompts = sorted(set.intersection(*of_each))
        if count * len(prompts) >= len(best[0]) * len(best[1]):
            best = repeats[:count], prompts
    leaves = [
        np.array([[side[repeat, prompt][leaf] for prompt in best[1]] for repeat in best[0]])
        for side in (own, base)
        for leaf in (0, 1)
    ]
    return speed_ratio(*leaves) if best[1] else None, len(best[1]), len(best[0])

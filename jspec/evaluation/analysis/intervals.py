"""Confidence intervals by the bootstrap: prompts are drawn again, with replacement.

Tokens of one answer are not independent of each other; answers to different prompts are.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Shaped

_NUM_SAMPLES = 2000
_PERCENTILES = 2.5, 97.5


class Interval(NamedTuple):
    """A figure with its 95 % interval.

    Attributes:
      value: of the prompts as they are.
      low: 2.5th percentile over resampled prompts.
      high: 97.5th percentile.
    """

    value: float
    low: float
    high: float


def mean_and_interval(
    sums: Shaped[np.ndarray, "p"],
    counts: Shaped[np.ndarray, "p"],
    *,
    num_samples: int = _NUM_SAMPLES,
    seed: int = 0,
) -> Interval:
    """Returns the ratio of two totals over prompts, such as drafts kept over drafts proposed.

    Args:
      sums: of each prompt.
      counts: likewise; where all those drawn are 0, the ratio counts as 0.
      num_samples: bootstrap samples.
      seed: of the resampling.
    """

    def ratio(picks: Int[np.ndarray, "n p"]) -> Float[np.ndarray, "n"]:
        return sums[picks].sum(axis=1) / np.maximum(counts[picks].sum(axis=1), 1)

    return bootstrap(ratio, len(sums), num_samples=num_samples, seed=seed)


def bootstrap(
    statistic: Callable[[Int[np.ndarray, "n p"]], Float[np.ndarray, "n"]],
    num_prompts: int,
    *,
    num_samples: int = _NUM_SAMPLES,
    seed: int = 0,
) -> Interval:
    """Returns a statistic of the prompts with its interval.

    Args:
      statistic: from rows of prompts' indices to its value on each row.
      num_prompts: how many there are, at least 1.
      num_samples: bootstrap samples.
      seed: of the resampling.
    """
    rng = np.random.default_rng(seed)
    picks = rng.integers(num_prompts, size=[num_samples, num_prompts])
    low, high = np.percentile(statistic(picks), _PERCENTILES)
    (value,) = statistic(np.arange(num_prompts)[None])
    return Interval(float(value), float(low), float(high))

"""How well counts fit a distribution: Pearson's chi-square and the total variation."""

import math
from typing import NamedTuple

import numpy as np

_SMALLEST_EXPECTATION = 25
_SEEN = 0.02  # p of what is wrong, though not for certain, is below this
_MARGIN = 1.5  # of the samples needed: how far off counts are varies


class Fit(NamedTuple):
    """The outcome.

    Attributes:
      p_value: probability of counts at least as far off if the distribution is right.
      total_variation: between the observed frequencies and the distribution.
      noise: mean total variation of that many samples of the distribution itself.
      num_cells: of the test, after pooling.
      num_samples: the sum of the counts.
    """

    p_value: float
    total_variation: float
    noise: float
    num_cells: int
    num_samples: int


def goodness_of_fit(counts: np.ndarray, probs: np.ndarray) -> Fit:
    """Tests counts against probabilities of the same shape, summing to 1 (Pearson, 1900).

    Cells of an expectation below 25 are pooled, so that the chi-square distribution holds far into
    its tail. A sample in a cell of probability 0 refutes the distribution by itself.

    Raises:
      ValueError: `probs` is no distribution.
    """
    if not (np.all(probs >= 0) and abs(probs.sum() - 1) < 1e-6):
        raise ValueError(f"expected probabilities that sum to 1; they sum to {probs.sum()}")
    import scipy.stats

    counts = counts.ravel().astype(float)
    probs = np.minimum(probs.ravel().astype(float), 1.0)  # a sum may be rounded up
    num_samples = int(counts.sum())
    expected = num_samples * probs
    # The mean of |count - expected| (de Moivre): 2 v (1 - p) P(count = v), v the first above it.
    above = np.floor(expected) + 1
    deviation = 2 * above * (1 - probs) * scipy.stats.binom.pmf(above, num_samples, probs)
    distance = 0.5 * np.abs(counts - expected).sum() / num_samples
    noise = 0.5 * deviation.sum() / num_samples
    is_rare = expected < _SMALLEST_EXPECTATION
    cell_of = np.where(is_rare, 0, np.cumsum(~is_rare))
    if expected[is_rare].sum() < _SMALLEST_EXPECTATION and not is_rare.all():
        # The rare ones join the smallest of the others.
        cell_of[is_rare] = cell_of[np.argmin(np.where(is_rare, np.inf, expected))]
        cell_of -= 1
    observed, wanted = (np.bincount(cell_of, cells) for cells in (counts, expected))
    statistic = np.sum((observed - wanted) ** 2 / wanted)
    degrees = len(observed) - 1
    p_value = float(scipy.stats.chi2.sf(statistic, degrees)) if degrees else 1.0
    if counts[probs == 0].any():
        p_value = 0.0
    return Fit(p_value, float(distance), float(noise), len(observed), num_samples)


def samples_needed(fit: Fit, level: float) -> int | None:
    """Returns at how many samples p should be below a level; None if the counts look right.

    Chi-square's excess over its degrees of freedom grows in proportion to the samples.
    """
    import scipy.stats

    degrees = fit.num_cells - 1
    if fit.p_value >= _SEEN or not degrees:
        return None
    probs = max(fit.p_value, 1e-300), level  # an impossible sample has p = 0
    reached, wanted = (scipy.stats.chi2.isf(p, degrees) - degrees for p in probs)
    return math.ceil(_MARGIN * fit.num_samples * wanted / reached)

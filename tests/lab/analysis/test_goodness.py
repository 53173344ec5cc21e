"""The chi-square that every statistical test stands on, against scipy and by its own p-values."""

import numpy as np
import pytest
import scipy.stats

from jspec.lab.analysis.goodness import goodness_of_fit, samples_needed

DISTRIBUTION = np.random.default_rng(0).dirichlet([0.3] * 60).reshape(3, 20)
NUM_SAMPLES = 3000


def draw(rng, distribution=DISTRIBUTION, num_samples=NUM_SAMPLES):
    """Returns counts of independent samples."""
    return rng.multinomial(num_samples, distribution.ravel()).reshape(distribution.shape)


def test_p_values_of_the_right_distribution_are_uniform():
    """Guards against a test that cries wolf or sleeps; many cells are pooled here.

    1,000 samples of 3,000 draws; Kolmogorov and Smirnov's test refuses a uniform distribution once
    in 10^4 (p-values of counts are not quite continuous, which is far below what it sees).
    """
    rng = np.random.default_rng(1)
    p_values = [goodness_of_fit(draw(rng), DISTRIBUTION).p_value for _ in range(1000)]
    assert scipy.stats.kstest(p_values, "uniform").pvalue > 1e-4


@pytest.mark.parametrize(
    ("distribution", "counts", "pooled"),
    [
        ([0.1, 0.3, 0.6], [130, 310, 560], ([130, 310, 560], [100, 300, 600])),
        ([0.5, 0.47, 0.01, 0.01, 0.01], [520, 440, 30, 10, 0], ([520, 440, 40], [500, 470, 30])),
        # Too few for one of their own join the smallest, whose statistic would be no chi-square.
        ([0.5, 0.05, 0.44, 0.004, 0.006], [505, 55, 425, 5, 10], ([505, 70, 425], [500, 60, 440])),
    ],
)
def test_statistic_is_pearsons_and_rare_cells_are_pooled(distribution, counts, pooled):
    """Against scipy. Three cells of expectation 10 make one of 30, tested as such."""
    fit = goodness_of_fit(np.array(counts), np.array(distribution))
    distance = np.abs(np.array(counts) / 1000 - distribution).sum() / 2
    np.testing.assert_allclose(fit.total_variation, distance)
    np.testing.assert_allclose(fit.p_value, scipy.stats.chisquare(*pooled).pvalue, rtol=1e-12)
    assert (fit.num_cells, fit.num_samples) == (3, 1000)


def test_one_impossible_sample_refutes_the_distribution():
    """Guards against an impossible token that hides among the pooled ones, or beside one path."""
    distribution = np.array([0.6, 0.399, 0.001, 0.0])
    assert goodness_of_fit(np.array([600, 399, 1, 0]), distribution).p_value > 0.5
    assert goodness_of_fit(np.array([600, 399, 0, 1]), distribution).p_value == 0
    certain = np.array([0.0, 1.0, 0.0])  # as temperature 0 has it
    assert goodness_of_fit(np.array([0, 50, 0]), certain) == (1.0, 0.0, 0.0, 1, 50)
    assert goodness_of_fit(np.array([1, 49, 0]), certain).p_value == 0


@pytest.mark.parametrize("error", [0.05, -0.05])
def test_a_wrong_distribution_is_refused(error):
    """Negative control: 5 % of one cell's probability, at 1,000,000 samples."""
    wrong = DISTRIBUTION.copy()
    largest = np.unravel_index(DISTRIBUTION.argmax(), DISTRIBUTION.shape)
    wrong[largest] *= 1 + error
    wrong /= wrong.sum()
    counts = draw(np.random.default_rng(2), num_samples=1_000_000)
    assert goodness_of_fit(counts, wrong).p_value < 1e-6
    assert goodness_of_fit(counts, DISTRIBUTION).p_value > 1e-3


def test_noise_is_the_total_variation_that_the_distribution_itself_gives():
    """Guards against a yardstick that is off where most cells are rare. Six standard errors."""
    rng = np.random.default_rng(3)
    fits = [goodness_of_fit(draw(rng), DISTRIBUTION) for _ in range(500)]
    distances = [fit.total_variation for fit in fits]
    margin = 6 * np.std(distances) / np.sqrt(len(distances))
    assert abs(np.mean(distances) - fits[0].noise) < margin


def test_samples_needed():
    """At that many samples what is wrong is rejected nearly always, at a third seldom."""
    rng, level = np.random.default_rng(8), 1e-8
    right = np.full(20, 1 / 20)
    wrong = right * (1 + 0.1 * (-1.0) ** np.arange(20))

    def share_rejected(num_samples):
        fits = [goodness_of_fit(draw(rng, wrong, num_samples), right) for _ in range(200)]
        return np.mean([fit.p_value < level for fit in fits])

    few = goodness_of_fit(draw(rng, wrong, 4000), right)
    assert level < few.p_value < 1e-3
    needed = samples_needed(few, level)
    assert share_rejected(needed) > 0.8 > 0.5 > share_rejected(needed // 3)
    assert samples_needed(goodness_of_fit(draw(rng, right, 4000), right), level) is None

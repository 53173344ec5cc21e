"""Ratios of totals on made-up prompts, and of speeds on made-up timings."""

import numpy as np
import pytest

from jspec.lab.analysis import ratios
from jspec.lab.analysis.ratios import mean_and_interval, speed_ratio


def test_the_value_is_the_ratio_of_the_totals():
    """Guards against a mean of ratios, in which a short answer counts like a long answer."""
    value, low, high = mean_and_interval(np.array([1.0, 30.0]), np.array([10.0, 40.0]))
    assert value == pytest.approx(31 / 50)
    assert low == pytest.approx(0.1)  # both draws the first
    assert high == pytest.approx(0.75)
    assert mean_and_interval(np.zeros(3), np.zeros(3)) == (0, 0, 0)  # a drafter that is silent
    of_one = mean_and_interval(np.array([3.0, 0.0]), np.array([4, 0]))
    assert of_one == pytest.approx((0.75, 0, 0.75))


def test_the_interval_over_prompts_holds_the_truth_about_as_often_as_it_says():
    """200 made-up studies of 60 prompts, whose answers' tokens are alike.

    For a true coverage of 93 % fewer than 172 have odds of about 1 in 10^4 (the seed is fixed).
    Resampling tokens in place of prompts would cover a good deal less.
    """
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        rates = rng.beta(2, 3, 60)
        sums = rng.binomial(40, rates)
        _, low, high = mean_and_interval(sums, np.full(60, 40))
        hits += low <= 0.4 <= high
    assert hits >= 172


def test_a_known_ratio_is_found_whatever_the_answers_lengths():
    """Guards against a ratio of seconds where one side wrote more tokens."""
    rng = np.random.default_rng(0)
    base_tokens = rng.integers(10, 50, (5, 7)).astype(float)
    tokens = base_tokens + 5
    ratio = speed_ratio(tokens / 30, tokens, base_tokens / 10, base_tokens)
    assert ratio == pytest.approx((3.0, 3.0, 3.0))
    # A slow repeat slows both sides; medians of each side apart would see a speed-up.
    slowness = np.array([1, 9, 1, 5, 2.0])[:, None]
    tokens = np.full((5, 3), 10.0)
    ratio = speed_ratio(slowness * tokens, tokens, slowness * 2 * tokens, tokens)
    assert ratio == pytest.approx((2.0, 2.0, 2.0))


def test_the_interval_of_speeds_holds_the_truth_about_as_often_as_it_says(monkeypatch):
    """Guards against an interval much too narrow or too wide.

    N = 100 made-up benchmarks of 20 repeats and 20 prompts, ratio 1.5. A bootstrap of so few runs
    covers a little less than 95%; below 85 or a mean width over 0.2 is a mistake (for a true
    coverage of 93%, a count below 85 has odds of about 1 in 400; the seed is fixed).
    """
    monkeypatch.setattr(ratios, "_NUM_SAMPLES", 200)
    rng = np.random.default_rng(1)
    tokens = np.full((20, 20), 10.0)
    hits, widths = 0, []
    for _ in range(100):
        seconds, base = tokens / 15, tokens / 10
        seconds, base = (t * np.exp(rng.normal(0, 0.2, (20, 20))) for t in (seconds, base))
        ratio = speed_ratio(seconds, tokens, base, tokens)
        hits += ratio.low <= 1.5 <= ratio.high
        widths.append(ratio.high - ratio.low)
    assert hits >= 85
    assert np.mean(widths) < 0.2


def test_answers_that_took_no_time_do_not_spoil_the_interval():
    """A prompt whose answer ends with its first token, which some samples have alone."""
    seconds, tokens = np.array([[0.0, 2.0]]), np.array([[0.0, 10.0]])
    ratio = speed_ratio(seconds, tokens, 2 * seconds, tokens)
    assert ratio == (2.0, 2.0, 2.0)


def test_the_resampling_is_reproducible():
    """Guards against a report that changes when it is made again."""
    rng = np.random.default_rng(2)
    seconds = rng.uniform(1, 2, (4, 4))
    tokens = np.ones((4, 4))
    first, again = (speed_ratio(seconds, tokens, tokens, tokens) for _ in range(2))
    assert first == again
    assert first.low < first.median < first.high

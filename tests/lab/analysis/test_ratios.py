"""Rates of accepted drafts, the tokens that they let expect, and ratios of made-up timings."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jspec.generation.result import RoundCounts, acceptance_rate
from jspec.generation.result import acceptance_by_position as by_position
from jspec.lab.analysis import ratios
from jspec.lab.analysis.ratios import (
    acceptance,
    acceptance_by_position,
    alpha_of,
    mean_and_interval,
    observed_alpha,
    share,
    shares_by_accepted,
    speed_ratio,
    tokens_by_position,
)

ROUNDS = [[RoundCounts(3, 1), RoundCounts(3, 3)], [RoundCounts(3, 0)]]


def test_rates_have_intervals_over_prompts_and_agree_with_the_counts():
    """The same figures as `jspec.generation.result` gives, and what prompts differ in."""
    rng = np.random.default_rng(1)
    prompts = [
        [RoundCounts(int(n), int(rng.integers(n + 1))) for n in rng.integers(0, 5, size=30)]
        for _ in range(6)
    ]
    together = [a_round for own in prompts for a_round in own]
    for is_conditional in (False, True):
        rates = acceptance_by_position(prompts, is_conditional=is_conditional)
        assert [rate.median for rate in rates] == pytest.approx(
            by_position(together, is_conditional=is_conditional)
        )
        assert all(rate.low < rate.median < rate.high for rate in rates)
    alpha = observed_alpha(prompts)
    assert alpha.median == pytest.approx(alpha_of(together))
    assert alpha.low < alpha.median < alpha.high
    assert acceptance(prompts).median == pytest.approx(acceptance_rate(together))


def test_rates_by_hand():
    """2 of 3, 1 of 3, 1 of 3 are kept; of those examined 2 of 3, 1 of 2, 1 of 1."""
    of_all = acceptance_by_position(ROUNDS, is_conditional=False)
    assert [rate.median for rate in of_all] == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    # one prompt keeps the first draft always, the other never
    assert (of_all[0].low, of_all[0].high) == (0, 1)
    examined = acceptance_by_position(ROUNDS, is_conditional=True)
    assert [rate.median for rate in examined] == pytest.approx([2 / 3, 1 / 2, 1])
    shares = shares_by_accepted(ROUNDS, 3)
    assert [share.median for share in shares] == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])
    # A rejected draft was examined; those after it were not; a full round has no rejection.
    rounds = [RoundCounts(*pair) for pair in ((4, 2), (4, 4), (0, 0), (4, 0))]
    assert alpha_of(rounds) == 6 / (3 + 4 + 1)


def test_where_nothing_was_proposed_there_are_no_rates():
    """Guards against a 0 in the place of nothing, and a division by it."""
    silent = [[RoundCounts(0, 0)]]
    assert observed_alpha(silent) is None
    assert acceptance(silent) is None
    assert acceptance_by_position(silent, is_conditional=True) == []
    assert acceptance_by_position([[]], is_conditional=False) == []
    assert alpha_of(silent[0]) == 0
    assert tokens_by_position(silent[0]) == 1
    assert share([1, 2], [0, 0]) is None
    assert share([1, 2], [0, 4]).median == 0.5


@hypothesis.given(st.integers(1, 7), st.lists(st.integers(0, 7), min_size=1, max_size=30))
@hypothesis.settings(deadline=None, max_examples=40, derandomize=True)
def test_tokens_are_exact_for_proposals_of_one_length(length, kept):
    """Where a proposal is full or empty its length says nothing of its quality.

    Positions that no draft reached add nothing. Other lengths are by hand in reports/test_costs.py.
    """
    rounds = [RoundCounts(length, min(k, length)) if k < 7 else RoundCounts(0, 0) for k in kept]
    assert tokens_by_position(rounds) == pytest.approx(
        np.mean([1 + r.num_accepted for r in rounds])
    )


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

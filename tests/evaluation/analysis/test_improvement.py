"""The paper's formulas, against sums, simulated rounds and brute force."""

import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jspec.common.errors import InputError
from jspec.evaluation.analysis.improvement import (
    break_even_alpha,
    expected_tokens,
    least_improvement,
    memory_traffic,
    operations_growth,
    optimal_num_draft_tokens,
    oracle_improvement,
    walltime_improvement,
)

NUM_ROUNDS = 200_000
WORST = 5  # standard deviations: a right formula is further off once in two million
quickly = hypothesis.settings(deadline=None, max_examples=150, derandomize=True)
alphas = st.floats(0, 1)
costs = st.floats(0, 2)
numbers = st.integers(0, 12)


def simulate(alpha, num_draft_tokens, seed=0):
    """Returns how many drafts each of many rounds keeps."""
    rng = np.random.default_rng(seed)
    is_kept = rng.random((NUM_ROUNDS, num_draft_tokens)) < alpha
    return np.cumprod(is_kept, axis=1).sum(axis=1)


def deviation(samples, expected):
    """Returns how many standard deviations the mean is off."""
    return abs(samples.mean() - expected) / (samples.std() / math.sqrt(len(samples)))


@hypothesis.given(alphas, st.integers(0, 60))
@quickly
def test_expected_tokens_are_the_sum_of_powers(alpha, number):
    """Guards against a closed form that loses its digits near 1."""
    expected = math.fsum(alpha**i for i in range(number + 1))
    assert expected_tokens(alpha, number) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("alpha", "number", "expected"),
    [
        (1, 4, 5), (0, 4, 1), (0.3, 0, 1), (0, 0, 1), (1, 0, 1), (0.75, math.inf, 4),
        (1, math.inf, math.inf), (0, math.inf, 1),
    ],
)  # fmt: skip
def test_limits_are_exact(alpha, number, expected):
    """Guards against 0 / 0 and log 0."""
    assert expected_tokens(alpha, number) == expected


@pytest.mark.parametrize("alpha", [1 - 1e-15, 1 - 1e-9, 5e-324])
def test_next_to_the_limits_nothing_breaks(alpha):
    """Guards against cancellation: the limit is continuous."""
    assert expected_tokens(alpha, 7) == pytest.approx(8 if alpha > 0.5 else 1, rel=1e-7)


@pytest.mark.parametrize(("alpha", "number"), [(0.8, 4), (0.5, 1), (0.9, 10), (0.15, 3)])
def test_rounds_emit_as_many_tokens_as_expected(alpha, number):
    """200,000 simulated rounds; "alpha · gamma + 1", which is widely read, is refused."""
    tokens = simulate(alpha, number) + 1
    assert deviation(tokens, expected_tokens(alpha, number)) < WORST
    if number > 1:
        assert deviation(tokens, alpha * number + 1) > 10 * WORST


@pytest.mark.parametrize("verify_cost", [1.0, 1.7])
def test_simulated_rounds_save_as_much_time_operations_and_memory(verify_cost):
    """Thm 3.8 with a dearer verify call, Thm 3.11 and §3.4 on 200,000 simulated rounds."""
    alpha, number, c, c_hat, m = 0.7, 3, 0.1, 0.2, 0.3
    tokens = simulate(alpha, number, seed=1) + 1
    seconds = NUM_ROUNDS * (number * c + verify_cost)
    speed = walltime_improvement(alpha, number, c, verify_cost)
    assert tokens.sum() / seconds == pytest.approx(speed, rel=0.01)
    operations = NUM_ROUNDS * (number * c_hat + number + 1)
    growth = operations_growth(alpha, number, c_hat)
    assert operations / tokens.sum() == pytest.approx(growth, rel=0.01)
    reads = NUM_ROUNDS * (1 + number * m)
    assert reads / tokens.sum() == pytest.approx(memory_traffic(alpha, number, m), rel=0.01)
    assert memory_traffic(alpha, number) == pytest.approx(1 / expected_tokens(alpha, number))


@hypothesis.given(alphas, costs)
@quickly
def test_the_best_number_brings_at_least_the_minimum(alpha, c):
    """Cor. 3.9, both ways: above c one draft brings it; up to c no number brings anything."""
    speeds = [walltime_improvement(alpha, number, c) for number in range(30)]
    assert max(speeds) >= least_improvement(alpha, c) * (1 - 1e-12)
    if alpha > c:
        assert least_improvement(alpha, c) == pytest.approx(speeds[1])
        assert least_improvement(alpha, c) >= 1
    else:
        assert least_improvement(alpha, c) == 1
        assert max(speeds) == pytest.approx(1)


@hypothesis.given(alphas, costs, st.lists(st.floats(0.5, 3), min_size=13, max_size=13))
@quickly
def test_the_optimum_is_that_of_brute_force(alpha, c, verify_costs):
    """With verify calls of any cost: speed need not have a single peak."""
    best = optimal_num_draft_tokens(alpha, c, most=12, verify_cost=verify_costs.__getitem__)
    speeds = [walltime_improvement(alpha, n, c, verify_costs[n]) for n in range(13)]
    assert speeds[best] == pytest.approx(max(speeds), rel=1e-12)


def test_the_optimum_of_extremes():
    """Nothing where nothing pays, everything where all drafts are kept, the fewest of equals."""
    assert optimal_num_draft_tokens(0.2, 0.3) == 0
    assert optimal_num_draft_tokens(0.3, 0.3) == 0
    assert optimal_num_draft_tokens(0, 0) == 0
    assert optimal_num_draft_tokens(1, 0.5, most=40) == 40
    assert optimal_num_draft_tokens(0.8, 0.05) == 8
    assert optimal_num_draft_tokens(0.8, 0.05, most=3) == 3


@pytest.mark.parametrize(("alpha", "c"), [(0.8, 0.1), (0.9, 0.02), (0.3, 0.5)])
def test_an_oracle_drafts_what_will_be_kept(alpha, c):
    """200,000 rounds of a geometric number of drafts, all of them kept."""
    kept = np.random.default_rng(2).geometric(1 - alpha, NUM_ROUNDS) - 1
    simulated = (kept + 1).sum() / (1 + c * kept).sum()
    assert simulated == pytest.approx(oracle_improvement(alpha, c), rel=0.01)


@hypothesis.given(alphas, st.floats(0, 1), numbers)
@quickly
def test_no_fixed_number_beats_the_oracle(alpha, c, number):
    """Guards against a bound that is none."""
    assert walltime_improvement(alpha, number, c) <= oracle_improvement(alpha, c) * (1 + 1e-12)


def test_the_oracle_gains_about_what_the_paper_says():
    """ "Up to about 60 %" over the best fixed number for typical alpha and c (§3.5)."""
    gains = []
    for alpha in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95):
        for c in (0.01, 0.02, 0.05, 0.1, 0.15, 0.2):
            fixed = walltime_improvement(alpha, optimal_num_draft_tokens(alpha, c), c)
            gains.append(oracle_improvement(alpha, c) / fixed)
    assert 1.5 < max(gains) < 1.65
    assert oracle_improvement(1, 0) == math.inf
    assert oracle_improvement(1, 0.25) == 4
    assert oracle_improvement(0, 0.25) == 1


@hypothesis.given(numbers, costs, st.floats(0.5, 3))
@quickly
def test_break_even_is_where_drafting_begins_to_pay(number, c, v):
    """Guards against an alpha on the wrong side of it, and against one that does not exist."""
    alpha = break_even_alpha(number, c, v)
    if alpha is None:
        assert walltime_improvement(1, number, c, v) < 1
    else:
        assert walltime_improvement(alpha, number, c, v) >= 1
        if alpha > 1e-6:
            assert walltime_improvement(alpha - 1e-7, number, c, v) < 1


def test_break_even_of_one_draft_is_its_cost():
    """1 + alpha = c + v."""
    assert break_even_alpha(1, 0.4) == pytest.approx(0.4, abs=1e-12)
    assert break_even_alpha(1, 0.4, 1.1) == pytest.approx(0.5, abs=1e-12)
    assert break_even_alpha(2, 0) == 0
    assert break_even_alpha(3, 1.5) is None
    assert break_even_alpha(0, 0.4) == 0


def test_a_pair_known_from_its_bytes():
    """c = 0.385 and a verify call 5 % dearer than a step: the best speeds, by hand.

    E.g. (1 + 0.7 + 0.49) / (2 · 0.385 + 1.05) = 1.203.
    """
    for alpha, expected in ((0.7, 1.20), (0.8, 1.34), (0.9, 1.58)):
        speeds = [walltime_improvement(alpha, number, 0.385, 1.05) for number in range(1, 12)]
        assert round(max(speeds), 2) == expected


@pytest.mark.parametrize(
    "call",
    [
        lambda: expected_tokens(1.1, 2),
        lambda: expected_tokens(math.nan, 2),
        lambda: expected_tokens(0.5, -1),
        lambda: expected_tokens(0.5, 1.5),
        lambda: walltime_improvement(0.5, 2, -0.1),
        lambda: walltime_improvement(0.5, 2, 0.1, 0),
        lambda: walltime_improvement(0.5, math.inf, 0.1),
        lambda: operations_growth(0.5, 2, math.inf),
        lambda: memory_traffic(0.5, 2, -1),
        lambda: least_improvement(-1, 0.1),
        lambda: oracle_improvement(0.5, 1.5),
        lambda: optimal_num_draft_tokens(2, 0.1),
        lambda: break_even_alpha(2, math.nan),
    ],
)
def test_values_out_of_range_are_refused(call):
    """Guards against a curve of nonsense."""
    with pytest.raises(InputError, match=r"^expected .*\bgot\b"):
        call()

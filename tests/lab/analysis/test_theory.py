"""The paper's formulas, against sums, simulated rounds and brute force, and its tables."""

import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jspec.lab.analysis import theory
from jspec.lab.analysis.theory import (
    break_even_alpha,
    expected_tokens,
    operations_growth,
    optimal_num_draft_tokens,
    walltime_improvement,
)

NUM_ROUNDS = 200_000
quickly = hypothesis.settings(deadline=None, max_examples=80, derandomize=True)
alphas = st.floats(0, 1)
costs = st.floats(0, 2)
numbers = st.integers(0, 12)


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
        # Beside the limits nothing cancels.
        (1 - 1e-15, 7, pytest.approx(8)), (1 - 1e-9, 7, pytest.approx(8)), (5e-324, 7, 1),
    ],
)  # fmt: skip
def test_limits_are_exact(alpha, number, expected):
    """Guards against 0 / 0 and log 0."""
    assert expected_tokens(alpha, number) == expected


def test_simulated_rounds_are_as_expected():
    """Tokens (Eq. 1); time with a more expensive verify call (Thm 3.8), operations (Thm 3.11).

    200,000 rounds; "alpha · gamma + 1", which is widely read, is refused. A right formula is more
    than five standard deviations off once in two million.
    """
    alpha, number, c, v = 0.7, 3, 0.1, 1.7
    is_kept = np.random.default_rng(0).random((NUM_ROUNDS, number)) < alpha
    tokens = np.cumprod(is_kept, axis=1).sum(axis=1) + 1
    error = tokens.std() / math.sqrt(NUM_ROUNDS)
    assert abs(tokens.mean() - expected_tokens(alpha, number)) < 5 * error
    assert abs(tokens.mean() - (alpha * number + 1)) > 50 * error
    seconds, operations = NUM_ROUNDS * (number * c + v), NUM_ROUNDS * (number + 1)
    speed = walltime_improvement(alpha, number, c, v)
    assert tokens.sum() / seconds == pytest.approx(speed, rel=0.01)
    assert operations / tokens.sum() == pytest.approx(operations_growth(alpha, number), rel=0.01)


@hypothesis.given(alphas, st.floats(0.05, 2))
@quickly
def test_the_optimum_is_that_of_brute_force(alpha, c):
    """Over every number up to 60."""
    speeds = [walltime_improvement(alpha, number, c) for number in range(60)]
    best = optimal_num_draft_tokens(alpha, c)
    assert walltime_improvement(alpha, best, c) >= max(speeds) * (1 - 1e-12)


def test_the_optimum_of_extremes():
    """Nothing where nothing pays, everything where all drafts are kept, the fewest of equals."""
    assert optimal_num_draft_tokens(0.2, 0.3) == 0
    assert optimal_num_draft_tokens(0.3, 0.3) == 0
    assert optimal_num_draft_tokens(0, 0) == 0
    assert optimal_num_draft_tokens(1, 0.5) == 1000
    assert optimal_num_draft_tokens(0.8, 0.05) == 8


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


# alpha, gamma, operations and speed as arXiv 2211.17192 prints them.
PRINTED = [
    (0.6, 2, "1.53", "1.96"), (0.7, 3, "1.58", "2.53"), (0.8, 2, "1.23", "2.44"),
    (0.8, 5, "1.63", "3.69"), (0.9, 2, "1.11", "2.71"), (0.9, 10, "1.60", "6.86"),
]  # fmt: skip


def test_table1_is_the_papers_to_every_digit():
    """In its order, with its trailing zeros."""
    rows = [(a, n, f"{ops:.2f}", f"{speed:.2f}") for a, n, ops, speed in theory.table1()["rows"]]
    assert rows == PRINTED


def column(table, name):
    index = table["columns"].index(name)
    return {row[0]: row[index] for row in table["rows"]}


def test_curves_are_the_formulas():
    """One point of each kind by hand, and the ends."""
    tokens = theory.figure2()
    assert column(tokens, "5 drafts")[0.8] == pytest.approx(3.68928)
    assert column(tokens, "3 drafts")[1.0] == 4
    assert column(tokens, "no limit")[0.9] == pytest.approx(10)
    assert column(tokens, "no limit")[1.0] is None
    best = theory.figure3()
    assert column(best, "c = 0.05")[0.8] == 8
    assert column(best, "c = 0.4")[0.4] == 0
    assert column(best, "c = 0.4")[0.42] > 0
    figure = theory.figure4()
    assert column(figure, "speed, 10 drafts")[0.9] == pytest.approx(6.8618940391)
    assert column(figure, "operations, 10 drafts")[0.9] == pytest.approx(11 / 6.8618940391)
    assert column(figure, "operations, 1 draft")[0.0] == 2

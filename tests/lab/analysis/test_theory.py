"""The paper's formulas, against sums, simulated rounds and brute force, and its tables."""

import json
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
def test_simulated_rounds_save_as_much_time_and_operations(verify_cost):
    """Thm 3.8 with a more expensive verify call, and Thm 3.11 on 200,000 simulated rounds."""
    alpha, number, c = 0.7, 3, 0.1
    tokens = simulate(alpha, number, seed=1) + 1
    seconds = NUM_ROUNDS * (number * c + verify_cost)
    speed = walltime_improvement(alpha, number, c, verify_cost)
    assert tokens.sum() / seconds == pytest.approx(speed, rel=0.01)
    operations = NUM_ROUNDS * (number + 1)
    growth = operations_growth(alpha, number)
    assert operations / tokens.sum() == pytest.approx(growth, rel=0.01)


@hypothesis.given(alphas, st.floats(0.05, 2))
@quickly
def test_the_optimum_is_that_of_brute_force(alpha, c):
    """Over every number up to 60."""
    speeds = [walltime_improvement(alpha, number, c) for number in range(60)]
    best = optimal_num_draft_tokens(alpha, c)
    assert walltime_improvement(alpha, best, c) >= max(speeds) * (1 - 1e-12)


@hypothesis.given(alphas, costs)
@quickly
def test_drafting_pays_where_one_draft_does(alpha, c):
    """Cor. 3.9, both ways: above c one draft brings (1 + alpha) / (1 + c); up to c none pays."""
    best = walltime_improvement(alpha, optimal_num_draft_tokens(alpha, c), c)
    if alpha > c:
        assert best >= (1 + alpha) / (1 + c) * (1 - 1e-12)
    else:
        assert best == pytest.approx(1)


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


@pytest.mark.parametrize("name", ["table1", "figure2", "figure3", "figure4"])
def test_tables_are_plain_and_whole(name):
    """Guards against a row without a column, and against an infinity that JSON does not know."""
    table = getattr(theory, name)()
    assert list(table) == ["columns", "units", "rows", "notes"]
    assert len(table["columns"]) == len(table["units"]) == len(set(table["columns"]))
    assert {len(row) for row in table["rows"]} == {len(table["columns"])}
    assert json.loads(json.dumps(table, allow_nan=False)) == table
    assert table["notes"]


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

"""The paper's Table 1, digit by digit, and its curves."""

import json
import math

import pytest

from jspec.lab.analysis import theory

# alpha, gamma, operations and speed as arXiv 2211.17192 prints them.
PRINTED = [
    (0.6, 2, "1.53", "1.96"), (0.7, 3, "1.58", "2.53"), (0.8, 2, "1.23", "2.44"),
    (0.8, 5, "1.63", "3.69"), (0.9, 2, "1.11", "2.71"), (0.9, 10, "1.60", "6.86"),
]  # fmt: skip


def test_table1_is_the_papers_to_every_digit():
    """In its order, with its trailing zeros."""
    rows = [(a, n, f"{ops:.2f}", f"{speed:.2f}") for a, n, ops, speed in theory.table1()["rows"]]
    assert rows == PRINTED


def test_the_paper_rounds_and_does_not_truncate():
    """What the table's note says: exact values round to the digits; cut off, half would not."""
    truncated = 0
    for alpha, number, operations, speed in PRINTED:
        exact = math.fsum(alpha**i for i in range(number + 1))
        for value, printed in (((number + 1) / exact, operations), (exact, speed)):
            assert abs(value - float(printed)) < 0.005
            truncated += f"{math.floor(value * 100 + 1e-9) / 100:.2f}" == printed
    assert truncated == 7
    assert "truncates nowhere" in theory.table1()["notes"][0]


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


def test_the_best_number_rises_with_alpha_and_falls_with_the_cost():
    """The shape of Figure 3."""
    rows = theory.figure3()["rows"]
    for row, below in zip(rows[1:], rows, strict=False):
        assert all(upper >= lower for upper, lower in zip(row[1:], below[1:], strict=True))
    assert all(list(row[1:]) == sorted(row[1:], reverse=True) for row in rows)

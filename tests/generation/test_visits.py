"""How many rounds a visit has."""

import pytest

from jspec.generation.engine import MAX_ROUNDS_PER_VISIT
from jspec.generation.visits import VisitLength


@pytest.mark.parametrize(
    ("milliseconds", "expected"),
    [(0.0, MAX_ROUNDS_PER_VISIT), (0.5, MAX_ROUNDS_PER_VISIT), (2.0, 20), (6.5, 8), (50.0, 8)],
)
def test_a_visit_takes_forty_milliseconds(milliseconds, expected):
    """But has its least number of rounds, and no more than the program has room for."""
    length = VisitLength(8)
    assert length.num_rounds == 8
    length.note(1e-3 * milliseconds * 8, 8)
    assert length.num_rounds == expected


def test_the_last_visit_counts():
    """A GPU's first visits take long; one without rounds, as all rows were done, says nothing."""
    length = VisitLength(2)
    length.note(0.3, 2)
    assert length.num_rounds == 2
    length.note(0.004, 2)
    assert length.num_rounds == 20
    length.note(0.002, 0)
    assert length.num_rounds == 20


def test_a_fixed_length_stays():
    length = VisitLength(4, is_fixed=True)
    length.note(1e-3, 4)
    assert length.num_rounds == 4

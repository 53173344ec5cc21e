"""How many rounds a visit has."""

import pytest

from jspec.generation.engine import MAX_ROUNDS_PER_VISIT, VisitLength


@pytest.mark.parametrize(
    ("milliseconds", "expected"),
    [(0.5, [16, MAX_ROUNDS_PER_VISIT]), (2.0, [16, 20]), (2.8, [15, 15]), (50.0, [8, 8])],
)
def test_a_visit_takes_forty_milliseconds(milliseconds, expected):
    """But has its least number of rounds, at most twice those of the visit before, and no more than
    the program has room for.
    """
    length = VisitLength(8)
    assert length.num_rounds == 8
    for number in expected:
        length.note(1e-3 * milliseconds * length.num_rounds, length.num_rounds)
        assert length.num_rounds == number


def test_the_last_visit_counts():
    """A GPU's first visits take long. One without rounds says nothing, nor does one whose seconds
    went into compiling.
    """
    length = VisitLength(2)
    length.note(0.3, 2)
    assert length.num_rounds == 2
    length.note(0.004, 2)
    assert length.num_rounds == 4
    for seconds, num_rounds in ((0.002, 0), (0.0, 4)):
        length.note(seconds, num_rounds)
        assert length.num_rounds == 4


def test_a_fixed_length_stays():
    length = VisitLength(4, is_fixed=True)
    length.note(1e-3, 4)
    assert length.num_rounds == 4

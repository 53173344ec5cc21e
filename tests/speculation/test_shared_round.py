"""What rows that share every round draft, against arithmetic by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.speculation.control import Demand, agree
from tests.speculation.test_control import COSTS, NUMBERS, as_rows, choose, make_control

ALL = jnp.ones([4], bool)
# A draft for each of many rows takes half as long again; of one row it costs next to nothing.
STEEP = np.array([[1.0, 1.5, 2.5, 4.5]] * 2, np.float32)
ALONE = np.array([[0.3, 0.31, 0.33, 0.37]] * 2, np.float32)


@jax.jit
def agreed(control, *arguments):
    return agree(Demand(control, control.costs, *arguments))


def shared(costs, num_rows=4, count=4):
    control, alone = make_control(count, costs), jnp.broadcast_to(ALONE, [count, *ALONE.shape])
    return control.replace(num_rows=num_rows, alone=alone)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ((7, 0, 0, 0), (0, 0, 0, 0)),  # 4.5 rounds for at most 7 tokens more
        ((7, 7, 7, 7), (0, 0, 0, 0)),  # the same, for each
        ((1, 0, 0, 0), (0, 0, 0, 0)),
        ((0, 0, 0, 0), (0, 0, 0, 0)),
    ],
)
def test_no_row_drafts_what_the_others_pay_for(wanted, expected):
    """Of the lookup a first draft is kept three times in ten: never worth half a round."""
    assert tuple(agreed(shared(STEEP), as_rows(0, 0, 0, 0), as_rows(*wanted), ALL, ALL)) == expected


def test_all_have_what_is_worth_it_for_all():
    """The most tokens a second of the whole batch, by trying every number."""
    control, kinds = shared(COSTS), as_rows(1, 1, 2, 2)
    expected = np.asarray(control.expected_tokens(kinds, is_proven=False))
    for wanted in ((7, 7, 7, 7), (7, 0, 7, 0), (3, 1, 0, 7), (1, 1, 1, 1), (0, 0, 0, 7)):
        speeds = []
        for most in NUMBERS:
            places = [NUMBERS.index(min(most, number)) for number in wanted]
            tokens = sum(row[place] for row, place in zip(expected, places, strict=True))
            drafter = [0, 0, 1, 1]
            seconds = sum(COSTS[d][NUMBERS.index(most)] for d in drafter)
            speeds.append(tokens / (seconds * (1.1 if most else 1.0)))
        most = NUMBERS[int(np.argmax(speeds))]
        actual = agreed(control, kinds, as_rows(*wanted), ALL, ALL)
        assert actual.tolist() == [min(number, most) for number in wanted], wanted


def test_rows_that_do_not_run_say_nothing():
    """Control: were they to count, a single row's drafts would not be worth it."""
    control, kinds, wanted = shared(COSTS), as_rows(2, 2, 2, 2), as_rows(1, 0, 0, 0)
    alone = agreed(control, kinds, wanted, jnp.array([True, False, False, False]), ALL)
    assert alone.tolist() == [1, 0, 0, 0]
    assert agreed(control, kinds, wanted, ALL, ALL).tolist() == [0, 0, 0, 0]


def test_a_row_that_may_not_draft_keeps_no_other_from_it():
    """As a server's request with `speculation` says; where all are such each has its number."""
    control, kinds = shared(COSTS), as_rows(1, 1, 1, 1)
    expected = agreed(control, kinds, as_rows(3, 3, 3, 0), ALL, ALL).tolist()
    assert expected == [3, 3, 3, 0]
    forbidden = control.costs.at[3, :, 1:].set(1e9)
    actual = agreed(control.replace(costs=forbidden), kinds, as_rows(3, 3, 3, 0), ALL, ALL)
    assert actual.tolist() == expected
    few = control.replace(costs=control.costs.at[:, :, 2:].set(1e9))
    assert agreed(few, kinds, as_rows(1, 1, 0, 1), ALL, ALL).tolist() == [1, 1, 0, 1]


def test_a_row_that_is_not_free_has_what_it_wants_whatever_its_company():
    """Else the drafts, and by the rejection rule the tokens, would depend on the others."""
    is_free = jnp.array([False, True, True, True])
    actual = agreed(shared(STEEP), as_rows(0, 0, 0, 0), as_rows(7, 7, 0, 0), ALL, is_free)
    assert actual.tolist() == [7, 0, 0, 0]
    costs = shared(STEEP, num_rows=8).round_costs(is_free)
    assert costs[0].tolist() == STEEP.tolist()
    assert (costs[1:] < STEEP).all()


def test_a_row_that_is_told_its_number_has_it():
    """While rounds are measured: else those of a bad drafter would be timed without its drafts."""
    forced = as_rows(7, -1, -1, -1)[:, None] * jnp.ones([1, len(shared(STEEP).kinds)], jnp.int32)
    control = shared(STEEP).replace(forced=forced)
    actual = agreed(control, as_rows(0, 0, 0, 0), as_rows(7, 7, 0, 0), ALL, ALL)
    assert actual.tolist() == [7, 0, 0, 0]


def test_where_nothing_is_shared_all_is_as_it_was():
    """A Generator's batch, and the rows that were measured."""
    control = make_control(4)
    actual = agreed(control, as_rows(0, 0, 0, 0), as_rows(7, 0, 0, 0), ALL, ALL)
    assert actual.tolist() == [7, 0, 0, 0]
    assert control.round_costs(ALL) is control.costs
    assert shared(COSTS).round_costs(ALL).tolist() == control.costs.tolist()


def test_rounds_of_fewer_rows_cost_what_lies_between_one_row_and_all():
    some = shared(STEEP, num_rows=8).round_costs(ALL)[0]
    np.testing.assert_allclose(some, ALONE + (STEEP - ALONE) * 3 / 7, rtol=1e-6)
    single = shared(STEEP, num_rows=8, count=1)
    costs = single.round_costs(ALL[:1])
    np.testing.assert_allclose(costs[0], ALONE)
    few, many = (choose(single.replace(costs=c), as_rows(1)) for c in (costs, single.costs))
    assert few.tolist() > many.tolist(), "where rows are few a draft costs next to nothing"

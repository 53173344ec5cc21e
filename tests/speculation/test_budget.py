"""How many drafts rows get that share calls of one size, or every round, against arithmetic."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.speculation.budget import CallSize, call_sizes, grant, smallest_call
from jspec.speculation.control import Demand, agree
from tests.speculation.test_control import COSTS, NUMBERS, as_rows, choose, make_control

ALL = jnp.ones([4], bool)
CALLS = call_sizes(4, NUMBERS)
SIZES = tuple(call.tokens for call in CALLS)
# A token more or less costs alike, half as much as its share of a plain round.
EVEN = np.array([[1.0, 1.5, 2.5, 4.5]] * 2, np.float32)
STEEP = np.array([[1.0, 2.2, 4.6, 9.4]] * 2, np.float32)
RATES = [(0.95, 0.9), (0.6, 0.5), (0.05, 0.05), (0.7, 0.99)]


def known(costs, rates=RATES):
    """Returns rows that have been given these first and later rates of acceptance."""
    control = make_control(len(rates), costs)
    assumed = jnp.broadcast_to(jnp.asarray(rates, jnp.float32)[:, None], control.assumed.shape)
    return control.replace(assumed=assumed)


@functools.partial(jax.jit, static_argnames="sizes")
def granted(control, wanted, is_running=ALL, is_free=ALL, kind=None, sizes=SIZES):
    kind = jnp.zeros_like(wanted) if kind is None else kind
    calls = tuple(CallSize(tokens, 7) for tokens in sizes)
    demand = Demand(control, control.costs, kind, wanted, is_running, is_free)
    return grant(demand, calls)


def expected_tokens(numbers, rates=RATES):
    """Returns the tokens that rows are expected to emit with these numbers of drafts."""
    kept = [[first * later**i for i in range(7)] for first, later in rates]
    return sum(1 + sum(row[:number]) for row, number in zip(kept, numbers, strict=True))


def seconds(tokens, costs):
    """Returns the seconds of the smallest call that is enough."""
    size = 4 if tokens == 4 else min(size for size in SIZES if size >= tokens)
    return np.interp(size, [4 * (1 + number) for number in NUMBERS], costs[0])


def test_sizes_rise_from_few_drafts_to_all():
    assert call_sizes(4, NUMBERS) == ((5, 7), (6, 7), (8, 7), (16, 7), (32, 7))
    assert call_sizes(2, NUMBERS, reads_logits=True) == ((3, 3), (4, 3), (8, 7), (16, 7))
    assert call_sizes(8, (0, 1), reads_logits=True) == ((10, 1), (12, 1), (16, 1))


@pytest.mark.parametrize("costs", [EVEN, STEEP, EVEN / 4 + 0.75])
@pytest.mark.parametrize("wanted", [(7, 7, 7, 7), (1, 7, 0, 2), (0, 0, 0, 3), (0, 0, 0, 0)])
def test_no_other_grant_promises_more_tokens_a_second(costs, wanted):
    """Of all numbers of drafts for all rows; a tenth more is asked of those with drafts."""

    def speed(numbers):
        total = 4 + sum(numbers)
        margin = 1.1 if sum(numbers) else 1.0
        return expected_tokens(numbers) / (seconds(total, costs) * margin)

    actual = tuple(granted(known(costs), as_rows(*wanted)).tolist())
    assert all(number <= most for number, most in zip(actual, wanted, strict=True))
    best = max(map(speed, itertools.product(*(range(most + 1) for most in wanted))))
    assert speed(actual) == pytest.approx(best, rel=1e-5)


def test_rows_get_different_numbers_where_one_width_gives_none():
    """What the budget is for: with one width for all, the likely drafts of one row pay for none."""
    control, wanted = known(EVEN), as_rows(7, 0, 0, 0)
    assert granted(control, wanted).tolist() == [4, 0, 0, 0]
    shared = control.replace(num_rows=4)
    demand = Demand(shared, control.costs, as_rows(0, 0, 0, 0), wanted, ALL, ALL)
    assert jax.jit(lambda _: agree(demand))(0).tolist() == [0, 0, 0, 0]


def test_of_equal_drafts_earlier_places_and_rows_go_first():
    """No draft without those before it, though all are as likely; the same in every run."""
    control = known(EVEN / 4 + 0.75, [(1.0, 1.0)] * 4)
    assert granted(control, as_rows(7, 7, 7, 7), sizes=(6,)).tolist() == [1, 1, 0, 0]
    assert granted(control, as_rows(0, 2, 7, 7), sizes=(11,)).tolist() == [0, 2, 3, 2]


def test_no_row_gets_more_than_a_call_takes_of_one():
    """Where processors read whole blocks small calls have narrow ones."""
    control, wanted = known(EVEN / 4 + 0.75), as_rows(7, 7, 0, 0)

    def granted_of(calls):
        kind = as_rows(0, 0, 0, 0)
        run = jax.jit(lambda c, wanted: grant(Demand(c, c.costs, kind, wanted, ALL, ALL), calls))
        return run(control, wanted)

    for call in (CallSize(8, 1), CallSize(8, 2), CallSize(8, 7)):
        calls = call, CallSize(32, 7)
        actual = granted_of(calls[:1])
        assert actual.max() == min(call.drafts, 4)
        assert smallest_call(as_rows(6, 6, 9), as_rows(2, 7, 1), calls).tolist() == [
            int(call.drafts < 2), int(call.drafts < 7), 1
        ]  # fmt: skip


def test_rows_that_do_not_run_leave_their_tokens_to_the_others():
    control = known(EVEN)
    running = jnp.array([True, False, False, False])
    assert granted(control, as_rows(7, 0, 0, 0), running, sizes=(5, 8)).tolist() == [7, 0, 0, 0]
    assert granted(control, as_rows(0, 0, 0, 0), ~ALL).tolist() == [0, 0, 0, 0]


def test_a_row_that_is_not_free_is_granted_what_it_wants():
    """By the rejection rule its tokens depend on its drafts."""
    is_free = jnp.array([True, True, False, True])
    for wanted in itertools.product([0, 7], [0, 3], [0, 2, 7], [0, 7]):
        assert granted(known(STEEP), as_rows(*wanted), ALL, is_free)[2] == wanted[2]
    # It is in the call whatever is granted: with 4 + 7 tokens what 16 take costs no more.
    filled = granted(known(STEEP), as_rows(7, 0, 7, 0), ALL, is_free, sizes=(5, 16, 32))
    assert filled.tolist() == [5, 0, 7, 0]


def test_a_row_whose_number_is_given_keeps_it():
    """As where costs are measured."""
    control = known(STEEP)
    forced = control.replace(forced=jnp.full_like(control.forced, 3))
    assert granted(control, as_rows(3, 3, 3, 3)).tolist() == [0, 0, 0, 0]
    assert granted(forced, as_rows(3, 3, 3, 3)).tolist() == [3, 3, 3, 3]


def test_a_row_that_may_not_draft_takes_no_drafts_from_others():
    """As a server's request with `speculation` says."""
    control = known(EVEN)
    expected = granted(control, as_rows(7, 1, 0, 7)).tolist()
    control = control.replace(costs=control.costs.at[2, :, 1:].set(1e9))
    assert granted(control, as_rows(7, 1, 0, 7)).tolist() == expected
    assert sum(expected) > 0


@jax.jit
def agreed(control, *arguments):
    return agree(Demand(control, control.costs, *arguments))


# Where every round has one width for all rows: a draft for each of many takes half as long again,
# and of one row alone it costs next to nothing.
ALONE = np.array([[0.3, 0.31, 0.33, 0.37]] * 2, np.float32)
DEAR = np.array([[1.0, 1.5, 2.5, 4.5]] * 2, np.float32)


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
    assert tuple(agreed(shared(DEAR), as_rows(0, 0, 0, 0), as_rows(*wanted), ALL, ALL)) == expected


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
    actual = agreed(shared(DEAR), as_rows(0, 0, 0, 0), as_rows(7, 7, 0, 0), ALL, is_free)
    assert actual.tolist() == [7, 0, 0, 0]
    costs = shared(DEAR, num_rows=8).round_costs(is_free)
    assert costs[0].tolist() == DEAR.tolist()
    assert (costs[1:] < DEAR).all()


def test_a_row_that_is_told_its_number_has_it():
    """While rounds are measured: else those of a bad drafter would be timed without its drafts."""
    forced = as_rows(7, -1, -1, -1)[:, None] * jnp.ones([1, len(shared(DEAR).kinds)], jnp.int32)
    control = shared(DEAR).replace(forced=forced)
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
    some = shared(DEAR, num_rows=8).round_costs(ALL)[0]
    np.testing.assert_allclose(some, ALONE + (DEAR - ALONE) * 3 / 7, rtol=1e-6)
    single = shared(DEAR, num_rows=8, count=1)
    costs = single.round_costs(ALL[:1])
    np.testing.assert_allclose(costs[0], ALONE)
    few, many = (choose(single.replace(costs=c), as_rows(1)) for c in (costs, single.costs))
    assert few.tolist() > many.tolist(), "where rows are few a draft costs next to nothing"

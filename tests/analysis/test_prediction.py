"""Predicted speed-ups, on rounds of which the truth is known."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jspec.analysis.improvement import walltime_improvement
from jspec.analysis.prediction import (
    PromptRun,
    at_fitting_width,
    expected_speedup,
    fit_round_costs,
    measured_speedup,
    observed_alpha,
    predict_halves,
)
from jspec.errors import InputError

PLAIN = 0.02
COSTS = {0: 0.021, 1: 0.023, 3: 0.026, 7: 0.034}
WIDTHS = tuple(COSTS)
BY_PLACE = (0.3, 0.6, 0.8, 0.9, 0.9)  # of real text: the first draft is the hardest
quickly = hypothesis.settings(deadline=None, max_examples=100, derandomize=True)
a_round = st.integers(0, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))


def draw_rounds(rng, count, length, rates=BY_PLACE, silent=0.4):
    """Returns rounds of proposals of a length, or of none; each place has its own acceptance."""
    rounds = []
    for _ in range(count):
        proposed = 0 if rng.random() < silent else length
        kept = np.cumprod(rng.random(proposed) < rates[:proposed]).sum()
        rounds.append((proposed, int(kept), "ngram" if proposed else ""))
    return rounds


def exact(rounds, cost):
    """Returns the speed-up that these very rounds had."""
    tokens = sum(1 + accepted for _, accepted, *_ in rounds)
    return tokens / sum(cost(proposed) for proposed, *_ in rounds) * PLAIN


@pytest.mark.parametrize("number", [1, 4])
def test_alpha_does_not_depend_on_the_number_of_drafts(number):
    """20,000 rounds, within 5 standard deviations; kept of all proposed falls with the number."""
    rng = np.random.default_rng(0)
    rounds = draw_rounds(rng, 20_000, number, rates=(0.7,) * 4, silent=0.3)
    tried = sum(min(kept + 1, proposed) for proposed, kept, _ in rounds)
    assert abs(observed_alpha(rounds) - 0.7) < 5 * np.sqrt(0.21 / tried)
    if number > 1:
        rate = sum(kept for _, kept, _ in rounds) / sum(proposed for proposed, *_ in rounds)
        assert rate < 0.55


def test_alpha_by_hand():
    """A refused draft was tried; those behind it were not; a full round has no refusal."""
    assert observed_alpha([(4, 2), (4, 4), (0, 0), (4, 0)]) == 6 / (3 + 4 + 1)
    assert observed_alpha([(0, 0)]) == 0


def test_a_speedup_by_hand():
    """Two rounds of 2 drafts and two of none; a_1 = 1 / 2, a_2 = 1."""
    rounds = [(2, 2), (2, 0), (0, 0), (0, 0)]
    cost = at_fitting_width({0: 1.0, 2: 1.5})
    assert expected_speedup(rounds, cost, 1.0) == pytest.approx((2 * (1 + 0.5 + 0.5) + 2) / 5)


@hypothesis.given(st.lists(a_round, min_size=1, max_size=30))
@quickly
def test_of_the_rounds_seen_the_prediction_is_exact(rounds):
    """By how often each place is kept, whatever lengths there are."""
    cost = at_fitting_width(COSTS)
    found = expected_speedup(rounds, cost, PLAIN, is_conditional=False)
    assert found == pytest.approx(exact(rounds, cost))


@hypothesis.given(st.integers(1, 7), st.lists(st.integers(0, 7), min_size=1, max_size=30))
@quickly
def test_conditional_acceptance_is_exact_too_for_one_length(length, kept):
    """Where a proposal is full or empty its length says nothing of its quality."""
    rounds = [(length, min(k, length)) if k < 7 else (0, 0) for k in kept]
    cost = at_fitting_width(COSTS)
    assert expected_speedup(rounds, cost, PLAIN) == pytest.approx(exact(rounds, cost))


def test_conditional_acceptance_is_off_where_long_proposals_are_good_ones():
    """Why there is a choice: one-token proposals never kept, three-token ones always."""
    rounds, cost = [(1, 0), (3, 3)] * 5, at_fitting_width(COSTS)
    assert expected_speedup(rounds, cost, PLAIN) < 0.8 * exact(rounds, cost)


@pytest.mark.parametrize("silent", [0.0, 0.4])
def test_other_rounds_of_the_same_law_are_predicted(silent):
    """20,000 rounds predict 20,000 others within 3 %; the i.i.d. form misses by over 10 %."""
    rng = np.random.default_rng(1)
    seen, others = (draw_rounds(rng, 20_000, 5, silent=silent) for _ in range(2))
    cost = at_fitting_width(COSTS)
    truth = exact(others, cost)
    assert expected_speedup(seen, cost, PLAIN) == pytest.approx(truth, rel=0.03)
    iid = walltime_improvement(observed_alpha(seen), 5, 0.0)
    assert abs(iid / truth - 1) > 0.1


def test_a_round_costs_what_the_fitting_width_costs():
    """Guards against the cost of a width that is not compiled."""
    cost = at_fitting_width(COSTS)
    assert [cost(n) for n in range(8)] == [COSTS[w] for w in (0, 1, 3, 3, 7, 7, 7, 7)]
    with pytest.raises(InputError, match="expected a cost of rounds of 8 drafts"):
        cost(8)


def make_prompts(seed, count=40, noise=0.0, slowness=1.0, rates=BY_PLACE):
    """Returns prompts of 5 drafts a round or none, in rounds at the widths 0 and 7."""
    rng, cost, prompts = np.random.default_rng(seed), at_fitting_width(COSTS), []
    for _ in range(count):
        rounds = draw_rounds(rng, 60, 5, rates=rates, silent=rng.uniform(0.1, 0.9))
        seconds = slowness * sum(cost(proposed) for proposed, *_ in rounds)
        tokens = sum(1 + accepted for _, accepted, _ in rounds)
        seconds, plain = (x * np.exp(noise * rng.normal()) for x in (seconds, tokens * PLAIN))
        prompts.append(PromptRun(rounds, tokens, seconds, tokens, plain))
    return prompts


def test_costs_are_found_in_the_answers_seconds():
    """Exactly where there is no noise; widths that nobody used lie in between."""
    cost = fit_round_costs(make_prompts(2), WIDTHS)
    assert cost(0) == pytest.approx(COSTS[0])
    assert cost(5) == pytest.approx(COSTS[7])
    assert cost(1) == pytest.approx(COSTS[0] + (COSTS[7] - COSTS[0]) / 7)


def test_fitted_costs_meet_the_total_and_never_fall():
    """With noise of 20 % an answer."""
    prompts = make_prompts(3, noise=0.2)
    cost = fit_round_costs(prompts, (0, 5))
    total = sum(cost(proposed) for prompt in prompts for proposed, *_ in prompt.rounds)
    assert total == pytest.approx(sum(prompt.seconds for prompt in prompts))
    assert 0 <= cost(0) <= cost(5)
    falling = [
        PromptRun([(proposed, 0)] * 9, 9, 9 * seconds, 9, 1.0)
        for proposed, seconds in ((0, 2.0), (5, 1.0))
    ]
    cost = fit_round_costs(falling, (0, 5))
    assert cost(0) == pytest.approx(cost(5)) == pytest.approx(1.5)


def test_each_half_predicts_the_other():
    """Within 10 % with noise of 3 % an answer; the i.i.d. form is further off."""
    prompts = make_prompts(4, count=80, noise=0.03)
    found = predict_halves(
        prompts,
        num_draft_tokens=5,
        cost_ratio=0.001,
        costs=lambda seen: fit_round_costs(seen, (0, 5)),
    )
    assert [one.seen for one in found] == ["even", "odd"]
    assert found[0].measured == pytest.approx(measured_speedup(prompts[1::2]))
    assert found[1].measured == pytest.approx(measured_speedup(prompts[::2]))
    for one in found:
        assert abs(one.by_position_error) < 0.1 < abs(one.iid_error)
        assert one.by_position == pytest.approx(one.measured * (1 + one.by_position_error))
        assert one.iid == pytest.approx(walltime_improvement(one.alpha, 5, 0.001))


def test_a_prediction_has_not_seen_what_it_predicts():
    """Guards against a leak: with other odd prompts, what even ones say of them stays."""
    even, odd = make_prompts(5, count=20), make_prompts(6, count=20)
    worse = make_prompts(7, count=20, slowness=2, rates=(0.1,) * 5)
    options = {"num_draft_tokens": 5, "cost_ratio": 0.0,
               "costs": lambda seen: fit_round_costs(seen, (0, 5))}  # fmt: skip
    one, other = (
        predict_halves([p for pair in zip(even, half, strict=True) for p in pair], **options)[0]
        for half in (odd, worse)
    )
    assert (one.alpha, one.iid, one.by_position) == (other.alpha, other.iid, other.by_position)
    assert other.measured < 0.7 * one.measured


def test_too_little_to_predict_from():
    """Clear lines in the place of a division by zero."""
    prompts = make_prompts(8, count=1)
    with pytest.raises(InputError, match="expected at least 2 prompts"):
        predict_halves(prompts, num_draft_tokens=5, cost_ratio=0, costs=lambda seen: COSTS.get)
    with pytest.raises(InputError, match="expected some rounds"):
        expected_speedup([], COSTS.get, PLAIN)
    with pytest.raises(InputError, match="expected some rounds"):
        fit_round_costs([PromptRun([], 0, 0.0, 5, 0.1)], (0, 5))

"""Predicted speed-ups, on rounds of which the truth is known."""

import dataclasses

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jspec.common.errors import InputError
from jspec.evaluation.analysis.improvement import walltime_improvement
from jspec.evaluation.reports.prediction import (
    PromptRun,
    RoundSpeed,
    cost_of,
    expect_by_position,
    expect_iid,
    measured_speed,
    observed_alpha,
    predict_halves,
    reading_of,
)
from jspec.generation.costs import RoundCosts
from jspec.generation.stats import RoundCounts

PLAIN = 0.02
SECONDS = {0: PLAIN, 1: 0.023, 3: 0.026, 7: 0.034}
COSTS = RoundCosts((512,), tuple(SECONDS), ("ngram",), ((tuple(SECONDS.values()),),))
BY_PLACE = (0.3, 0.6, 0.8, 0.9, 0.9)  # of real text: the first draft is the hardest
LENGTH = 100
cost = cost_of(COSTS)
quickly = hypothesis.settings(deadline=None, max_examples=100, derandomize=True)
counts = st.integers(0, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))


def make_round(proposed, kept):
    return RoundCounts(proposed, kept, "ngram" if proposed else "")


def draw_rounds(rng, count, length, rates=BY_PLACE, silent=0.4):
    """Returns rounds of proposals of a length, or of none; each place has its own acceptance."""
    rounds = []
    for _ in range(count):
        proposed = 0 if rng.random() < silent else length
        kept = np.cumprod(rng.random(proposed) < rates[:proposed]).sum()
        rounds.append(make_round(proposed, int(kept)))
    return rounds


def make_run(rounds, *, noise=1.0, slowness=1.0, plain_noise=1.0):
    """Returns what a prompt of these rounds takes."""
    seconds = noise * slowness * sum(cost(LENGTH, one) for one in rounds)
    tokens = sum(1 + one.num_accepted for one in rounds)
    return PromptRun(rounds, tokens, seconds, tokens, plain_noise * tokens * PLAIN, LENGTH)


@pytest.mark.parametrize("number", [1, 4])
def test_alpha_does_not_depend_on_the_number_of_drafts(number):
    """20,000 rounds, within 5 standard deviations; kept of all proposed falls with the number."""
    rng = np.random.default_rng(0)
    rounds = draw_rounds(rng, 20_000, number, rates=(0.7,) * 4, silent=0.3)
    tried = sum(min(one.num_accepted + 1, one.num_proposed) for one in rounds)
    assert abs(observed_alpha(rounds) - 0.7) < 5 * np.sqrt(0.21 / tried)
    if number > 1:
        kept = sum(one.num_accepted for one in rounds)
        assert kept / sum(one.num_proposed for one in rounds) < 0.55


def test_alpha_by_hand():
    """A refused draft was tried; those behind it were not; a full round has no refusal."""
    rounds = [make_round(*pair) for pair in ((4, 2), (4, 4), (0, 0), (4, 0))]
    assert observed_alpha(rounds) == 6 / (3 + 4 + 1)
    assert observed_alpha([make_round(0, 0)]) == 0


def test_a_round_costs_what_the_fitting_number_costs():
    """Guards against the cost of a width that is not compiled."""
    found = [cost(LENGTH, make_round(number, 0)) for number in range(8)]
    expected = [SECONDS[number] for number in (0, 1, 3, 3, 7, 7, 7, 7)]
    assert found == pytest.approx(expected)
    assert cost(LENGTH, None) == pytest.approx(PLAIN)
    for a_round in (make_round(8, 0), RoundCounts(1, 0, "model")):
        with pytest.raises(InputError, match="expected costs of rounds with"):
            cost(LENGTH, a_round)


def test_a_round_costs_what_its_drafter_and_context_cost():
    """Two drafters, two contexts; 1500 tokens need 2048 slots, in the middle of 1024 and 3072."""
    costs = RoundCosts((1024, 3072), (0, 3), ("ngram", "model"),
                       (((1.0, 2.0), (1.0, 4.0)), ((3.0, 6.0), (3.0, 12.0))))  # fmt: skip
    own = cost_of(costs)
    assert own(1500, RoundCounts(2, 0, "ngram")) == pytest.approx(4.0)
    assert own(1500, RoundCounts(3, 0, "model")) == pytest.approx(8.0)
    assert own(1500, None) == pytest.approx(2.0)


def test_a_speedup_by_hand():
    """Two rounds of 3 drafts and two of none; a_1 = 1 / 2, a_2 = 1, a_3 = 0."""
    rounds = [make_round(*pair) for pair in ((3, 2), (3, 0), (0, 0), (0, 0))]
    found = expect_by_position([make_run(rounds)], cost)
    assert found.tokens == pytest.approx((2 * (1 + 0.5 + 0.5 + 0) + 2) / 4)
    assert found.cost == pytest.approx((2 * 0.026 + 2 * PLAIN) / (4 * PLAIN))
    assert found.speedup == pytest.approx(found.tokens / found.cost)


def test_a_draft_models_reading_of_the_prompt_counts():
    """By hand: 4 rounds of 23 ms and 50 prompt tokens of 1 ms, beside 4 steps of 20 ms.

    A drafter that never proposed has read nothing.
    """
    reading = reading_of(dataclasses.replace(COSTS, reading=((0.001,),)))
    rounds = [make_round(1, 1), make_round(1, 0)] * 2
    run = make_run(rounds)._replace(num_prompt_tokens=50)
    expected = expect_by_position([run], cost, reading=reading)
    assert expected.cost == pytest.approx((4 * 0.023 + 0.05) / (4 * PLAIN))
    assert expect_by_position([run], cost).cost == pytest.approx(0.023 / PLAIN)
    silent = make_run([make_round(0, 0)] * 4)._replace(num_prompt_tokens=50)
    assert expect_by_position([silent], cost, reading=reading).cost == pytest.approx(1)


def test_costs_weigh_with_the_rounds_of_each_prompt():
    """Where plain steps differ with the context, so does what a round is compared with."""
    costs = RoundCosts((512, 2048), (0, 1), ("ngram",), (((1.0, 2.0),), ((10.0, 11.0),)))
    short = make_run([make_round(1, 0)] * 3)
    long = make_run([make_round(1, 0)])._replace(max_length=2000)
    found = expect_by_position([short, long], cost_of(costs))
    assert found.cost == pytest.approx((3 * 2 + 11) / (3 * 1 + 10))


@hypothesis.given(st.lists(counts, min_size=1, max_size=30))
@quickly
def test_of_the_rounds_seen_the_prediction_is_exact(pairs):
    """By how often each place is kept, whatever lengths there are."""
    run = make_run([make_round(*pair) for pair in pairs])
    found = expect_by_position([run], cost, is_conditional=False)
    assert found == pytest.approx(measured_speed([run]))


@hypothesis.given(st.integers(1, 7), st.lists(st.integers(0, 7), min_size=1, max_size=30))
@quickly
def test_conditional_acceptance_is_exact_too_for_one_length(length, kept):
    """Where a proposal is full or empty its length says nothing of its quality."""
    rounds = [make_round(length, min(k, length)) if k < 7 else make_round(0, 0) for k in kept]
    run = make_run(rounds)
    assert expect_by_position([run], cost) == pytest.approx(measured_speed([run]))


def test_conditional_acceptance_is_off_where_long_proposals_are_good_ones():
    """Why there is a choice: one-token proposals never kept, three-token ones always."""
    run = make_run([make_round(1, 0), make_round(3, 3)] * 5)
    assert expect_by_position([run], cost).speedup < 0.8 * measured_speed([run]).speedup


@pytest.mark.parametrize("silent", [0.0, 0.4])
def test_other_rounds_of_the_same_distribution_are_predicted(silent):
    """20,000 rounds predict 20,000 others within 2 %; the i.i.d. form misses by over 3 %."""
    rng = np.random.default_rng(1)
    seen, others = (make_run(draw_rounds(rng, 20_000, 5, silent=silent)) for _ in range(2))
    truth = measured_speed([others])
    assert abs(expect_by_position([seen], cost).error(truth)) < 0.02
    iid, _ = expect_iid([seen], cost, num_draft_tokens=5)
    assert abs(iid.error(truth)) > 0.03


def test_the_iid_form_is_theorem_3_8():
    """With c from the cost of a full round: 7 drafts add 0.7 plain steps."""
    run = make_run(draw_rounds(np.random.default_rng(2), 100, 5))
    found, cost_ratio = expect_iid([run], cost, num_draft_tokens=7)
    assert cost_ratio == pytest.approx(0.1)
    alpha = observed_alpha(run.rounds)
    assert found.speedup == pytest.approx(walltime_improvement(alpha, 7, 0.1))


@pytest.mark.parametrize("dear_first", [True, False])
def test_drafters_that_take_turns_cost_what_each_costs(dear_first):
    """By hand: of four rounds three are a lookup's at 26 ms, one is a model's at 60 ms.

    Guards against a c that depends on whose turn came first; a silent round counts as a lookup's.
    """
    seconds = (((PLAIN, 0.026), (PLAIN, 0.060)),)
    both = cost_of(RoundCosts((512,), (0, 3), ("ngram", "model"), seconds))
    rounds = [RoundCounts(3, 1, "model"), make_round(3, 0), make_round(2, 1), make_round(0, 0)]
    rounds = rounds if dear_first else rounds[::-1]
    speed, ratio = expect_iid([PromptRun(rounds, 6, 1.0, 6, 1.0, LENGTH)], both, num_draft_tokens=3)
    assert speed.cost == pytest.approx((3 * 0.026 + 0.060) / 4 / PLAIN)
    assert ratio == pytest.approx((speed.cost - 1) / 3)


def make_prompts(seed, count=40, noise=0.0, slowness=1.0, rates=BY_PLACE):
    """Returns prompts of 5 drafts a round or none."""
    rng, prompts = np.random.default_rng(seed), []
    for _ in range(count):
        rounds = draw_rounds(rng, 60, 5, rates=rates, silent=rng.uniform(0.1, 0.9))
        own, plain = np.exp(noise * rng.normal(size=2))
        prompts.append(make_run(rounds, noise=own, slowness=slowness, plain_noise=plain))
    return prompts


def test_each_half_predicts_the_other():
    """Within 4 % with noise of 3 % an answer; the i.i.d. form is further off."""
    prompts = make_prompts(4, count=80, noise=0.03)
    found = predict_halves(prompts, cost, num_draft_tokens=7)
    assert [one.seen for one in found] == ["even", "odd"]
    assert found[0].measured == measured_speed(prompts[1::2])
    assert found[1].measured == measured_speed(prompts[::2])
    for one in found:
        assert abs(one.by_position.error(one.measured)) < 0.04 < abs(one.iid.error(one.measured))


@pytest.mark.parametrize("wrong", [0.7, 1.4])
def test_wrong_costs_are_seen(wrong):
    """Guards against a prediction that learns its costs from the answers' seconds."""
    seconds = (PLAIN, *(wrong * SECONDS[number] for number in (1, 3, 7)))
    costs = RoundCosts((512,), tuple(SECONDS), ("ngram",), ((seconds,),))
    for one in predict_halves(make_prompts(4, count=80), cost_of(costs), num_draft_tokens=7):
        error = one.by_position.error(one.measured)
        assert abs(error) > 0.1
        assert (error > 0) == (wrong < 1)


def test_a_prediction_has_not_seen_what_it_predicts():
    """Guards against a leak: with other odd prompts, what even ones say of them stays."""
    even, odd = make_prompts(5, count=20), make_prompts(6, count=20)
    worse = make_prompts(7, count=20, slowness=2, rates=(0.1,) * 5)
    one, other = (
        predict_halves(
            [p for pair in zip(even, half, strict=True) for p in pair], cost, num_draft_tokens=7
        )[0]
        for half in (odd, worse)
    )
    assert (one.alpha, one.iid, one.by_position) == (other.alpha, other.iid, other.by_position)
    assert other.measured.speedup < 0.7 * one.measured.speedup


def test_the_error_has_two_parts():
    """Twice the tokens and twice the cost are right for the wrong reasons."""
    assert RoundSpeed(4.0, 2.0).error(RoundSpeed(2.0, 1.0)) == 0
    assert RoundSpeed(3.0, 1.0).error(RoundSpeed(2.0, 1.0)) == pytest.approx(0.5)


def test_too_little_to_predict_from():
    """Clear lines in the place of a division by zero."""
    with pytest.raises(InputError, match="expected at least 2 prompts"):
        predict_halves(make_prompts(8, count=1), cost, num_draft_tokens=5)
    for expect in (expect_by_position, lambda *args: expect_iid(*args, num_draft_tokens=5)):
        with pytest.raises(InputError, match="expected some rounds"):
            expect([make_run([])], cost)

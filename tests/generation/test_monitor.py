"""Acceptance by category, and the recommendation that follows from it and from costs."""

import dataclasses

import pytest

from jspec.generation.costs import RoundCosts
from jspec.generation.monitor import AcceptanceMonitor
from jspec.generation.request import SamplingParams
from jspec.generation.result import Result, RoundCounts, Stats

COSTS = RoundCosts((512,), (0, 1, 3, 7), ("x",), (((1.0, 1.1, 1.3, 1.7),),))


def answer(category, rounds):
    counts = tuple(RoundCounts(*pair, "x" if pair[0] else "") for pair in rounds)
    stats = Stats(counts, 1, 0.0, 1.0, 1.0, 0.0, 7)
    return Result("", [], [], "", "eos", SamplingParams(), stats, category=category)


def recommend(rounds, costs=COSTS):
    monitor = AcceptanceMonitor()
    monitor.add(answer("qa", rounds))
    (recommendation,) = monitor.recommend(costs)
    return recommendation


@pytest.mark.parametrize(
    ("rounds", "number", "speedup"),
    [
        ([(7, 7)] * 30, 7, 8 / 1.7),
        ([(7, 0)] * 30, 0, 1.0),
        ([(7, 1)] * 30, 1, 2 / 1.1),
        ([(0, 0)] * 30, 0, 1.0),
        ([(3, 3)] * 15 + [(0, 0)] * 15, 3, 2.5 / 1.15),
    ],
)
def test_the_best_number(rounds, number, speedup):
    """By hand: tokens a round over its cost; rounds without a proposal count as they are."""
    recommendation = recommend(rounds)
    assert recommendation.num_draft_tokens == number
    assert recommendation.speedup == pytest.approx(speedup)


def test_a_draft_model_that_reads_the_prompts_may_not_pay():
    """By hand: 30 rounds of 4 tokens are 120 plain steps; drafted they take 39, and the reading."""
    for prompt, number, speedup in ((100, 3, 120 / (39 + 0.5 * 100)), (200, 0, 1.0)):
        costs = dataclasses.replace(COSTS, numbers=(0, 3), seconds=(((1.0, 1.3),),),
                                    reading=((0.5,),))  # fmt: skip
        monitor = AcceptanceMonitor()
        drafted = answer("qa", [(3, 3)] * 30)
        monitor.add(dataclasses.replace(drafted, prompt_token_ids=[1] * prompt))
        (recommendation,) = monitor.recommend(costs)
        assert (recommendation.num_draft_tokens, recommendation.speedup) == (
            number,
            pytest.approx(speedup),
        )


def test_too_little_is_no_reason():
    """Guards against a recommendation from one answer of three rounds."""
    recommendation = recommend([(7, 7)] * 3)
    assert (
        recommendation.num_draft_tokens,
        recommendation.speedup,
        recommendation.acceptance_rate,
    ) == (None, None, 1.0)
    assert str(recommendation) == "qa: 100% of drafts accepted in 3 rounds"


def test_without_costs_there_is_no_number():
    """Acceptance alone does not say whether drafting pays."""
    recommendation = recommend([(7, 7)] * 30, costs=None)
    assert (recommendation.num_draft_tokens, recommendation.acceptance_rate) == (None, 1.0)


def test_categories_are_apart():
    monitor = AcceptanceMonitor()
    for category, kept in (("qa", 0), ("code", 7), ("qa", 0), (None, 7)):
        monitor.add(answer(category, [(7, kept)] * 12))
    by_category = {
        recommendation.category: recommendation for recommendation in monitor.recommend(COSTS)
    }
    assert list(by_category) == ["qa", "code", "all"]
    assert (by_category["qa"].num_rounds, by_category["qa"].num_draft_tokens) == (24, 0)
    assert (by_category["code"].num_rounds, by_category["code"].num_draft_tokens) == (12, None)
    assert str(by_category["qa"]).endswith("off: drafting does not pay")

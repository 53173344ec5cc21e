"""Costs of rounds, and the speed-ups predicted by them, on rounds of which the truth is known."""

import dataclasses

import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.generation.costs import RoundCosts
from jspec.generation.result import RoundCounts
from jspec.lab.analysis.ratios import alpha_of
from jspec.lab.analysis.theory import walltime_improvement
from jspec.lab.reports.costs import (
    cost_lines,
    predict_by_position,
    predict_iid,
    prediction_blocks,
    round_seconds,
)
from jspec.lab.reports.scene import TimedAnswer, make_scenes, parse_cells
from tests.lab.reports.workdirs import cells, config

PLAIN = 0.02
SECONDS = {0: PLAIN, 1: 0.023, 3: 0.026, 7: 0.034}
COSTS = RoundCosts((512,), tuple(SECONDS), ("ngram",), ((tuple(SECONDS.values()),),))
LENGTH = 100


def a_round(proposed, kept=0, drafter="ngram"):
    return RoundCounts(proposed, kept, drafter if proposed else "")


def answer(rounds, *, length=LENGTH, num_prompt_tokens=0):
    """Returns an answer of these rounds; its seconds are not looked at."""
    tokens = (0,) * (length - num_prompt_tokens)
    return TimedAnswer("all", num_prompt_tokens, tokens, 0, np.nan, tuple(rounds))


def test_a_round_costs_what_the_fitting_number_costs():
    """Guards against the cost of a width that is not compiled."""
    actual = [round_seconds(COSTS, LENGTH, a_round(number)) for number in range(8)]
    expected = [SECONDS[number] for number in (0, 1, 3, 3, 7, 7, 7, 7)]
    assert actual == pytest.approx(expected)


def test_a_round_costs_what_its_drafter_and_context_cost():
    """Two drafters, two contexts; 1500 tokens need 2048 slots, in the middle of 1024 and 3072."""
    costs = RoundCosts((1024, 3072), (0, 3), ("ngram", "model"),
                       (((1.0, 2.0), (1.0, 4.0)), ((3.0, 6.0), (3.0, 12.0))))  # fmt: skip
    assert round_seconds(costs, 1500, a_round(2)) == pytest.approx(4.0)
    assert round_seconds(costs, 1500, a_round(3, drafter="model")) == pytest.approx(8.0)
    assert round_seconds(costs, 1500, a_round(0)) == pytest.approx(2.0)


@pytest.mark.parametrize("unknown", [a_round(8), a_round(1, drafter="eagle")])
def test_a_round_that_was_not_calibrated_is_refused(unknown):
    """Guards against a traceback, and against the cost of another round."""
    with pytest.raises(InputError, match="expected costs of rounds with"):
        round_seconds(COSTS, LENGTH, unknown)


def test_a_speedup_by_hand():
    """Two rounds of 3 drafts and two of none; a_1 = 1 / 2, a_2 = 1, a_3 = 0."""
    rounds = [a_round(3, 2), a_round(3), a_round(0), a_round(0)]
    tokens = (2 * (1 + 0.5 + 0.5 + 0) + 2) / 4
    cost = (2 * 0.026 + 2 * PLAIN) / (4 * PLAIN)
    assert predict_by_position([answer(rounds)], COSTS) == pytest.approx(tokens / cost)


def test_a_draft_models_reading_of_the_prompt_counts():
    """By hand: 4 rounds of 23 ms and 50 prompt tokens of 1 ms, beside 4 steps of 20 ms.

    A drafter that never proposed has read nothing.
    """
    costs = dataclasses.replace(COSTS, reading=((0.001,),))
    seen = [answer([a_round(1, 1), a_round(1)] * 2, num_prompt_tokens=50)]
    assert predict_by_position(seen, costs) == pytest.approx(1.5 * 4 * PLAIN / (4 * 0.023 + 0.05))
    assert predict_by_position(seen, COSTS) == pytest.approx(1.5 * PLAIN / 0.023)
    silent = [answer([a_round(0)] * 4, num_prompt_tokens=50)]
    assert predict_by_position(silent, costs) == pytest.approx(1)


def test_costs_weigh_with_the_rounds_of_each_answer():
    """Where plain steps differ with the context, so does what a round is compared with."""
    costs = RoundCosts((512, 2048), (0, 1), ("ngram",), (((1.0, 2.0),), ((10.0, 11.0),)))
    seen = [answer([a_round(1)] * 3), answer([a_round(1)], length=2000)]
    assert predict_by_position(seen, costs) == pytest.approx((3 * 1 + 10) / (3 * 2 + 11))


def test_the_iid_form_is_theorem_3_8():
    """With c from the cost of a full round: 7 drafts add 0.7 plain steps."""
    rounds = [a_round(5, 3), a_round(5, 0), a_round(0), a_round(5, 5), a_round(2, 1)]
    speedup, cost_ratio = predict_iid([answer(rounds)], COSTS)
    assert cost_ratio == pytest.approx(0.1)
    assert speedup == pytest.approx(walltime_improvement(alpha_of(rounds), 7, 0.1))


@pytest.mark.parametrize("expensive_first", [True, False])
def test_drafters_that_take_turns_cost_what_each_costs(expensive_first):
    """By hand: of four rounds three are a lookup's at 26 ms, one is a model's at 60 ms.

    Guards against a c that depends on whose turn came first; a silent round counts as a lookup's.
    """
    costs = RoundCosts((512,), (0, 3), ("ngram", "model"), (((PLAIN, 0.026), (PLAIN, 0.060)),))
    rounds = [a_round(3, 1, "model"), a_round(3), a_round(2, 1), a_round(0)]
    _, ratio = predict_iid([answer(rounds if expensive_first else rounds[::-1])], costs)
    assert ratio == pytest.approx(((3 * 0.026 + 0.060) / 4 / PLAIN - 1) / 3)


def predictions(seconds):
    """Returns the rows of predictions; a round of up to three drafts is said to take `seconds`."""
    (scene,) = make_scenes(config(), parse_cells(cells()))
    costs = RoundCosts((512,), (0, 3), ("prompt_lookup",), (((0.1, seconds),),))
    _, _, table = prediction_blocks([scene], {"lookup:3": costs})
    return {row["prompts"]: row for row in table.rows}


def test_each_category_is_predicted_from_its_acceptance():
    """By hand. qa: nothing is kept, a round costs 1.2 steps. code: of 3, 3 and 1 drafts 7 are kept.

    Of the 8 drafts examined in code alpha is 7 / 8; a_1 = 1, a_2 = 2 / 3, a_3 = 1.
    """
    rows = predictions(0.12)
    assert list(rows) == ["all", "qa", "code"]
    assert {row["method"] for row in rows.values()} == {"`lookup:3`"}
    assert {row["c"] for row in rows.values()} == {"0.067"}
    qa, code = rows["qa"], rows["code"]
    assert qa["alpha"] == "0.000"
    assert qa["measured"].startswith("0.83")
    assert qa["Theorem 3.8"] == qa["by position"] == "0.83"
    assert qa["Theorem 3.8: error (%)"] in ("+0", "-0")
    assert code["alpha"] == "0.875"
    assert code["measured"].startswith(f"{10 / 3.6:.2f}")
    assert code["Theorem 3.8"] == f"{walltime_improvement(7 / 8, 3, 0.2 / 3):.2f}"
    assert code["by position"] == f"{(1 + 1 + 2 / 3 + 2 / 3) / 1.2:.2f}"
    # Costs are not learned from the answers' seconds: wrong ones are seen.
    assert predictions(0.15)["qa"]["Theorem 3.8: error (%)"] == "-20"


def test_too_little_to_predict_from():
    """No chapter without costs, of batches, or beside another baseline."""
    costs = RoundCosts((512,), (0, 3), ("prompt_lookup",), (((0.1, 0.12),),))
    (scene,) = make_scenes(config(), parse_cells(cells()))
    batch = dataclasses.replace(scene, batch_size=2)
    methods = dict(reversed(config()["methods"].items()))
    (reversed_scene,) = make_scenes(config(methods=methods), parse_cells(cells()))
    assert prediction_blocks([scene], {}) == []
    assert prediction_blocks([batch], {"lookup:3": costs}) == []
    assert prediction_blocks([reversed_scene], {"lookup:3": costs}) == []
    assert len(prediction_blocks([scene], {"lookup:3": costs})) == 3


def test_fixed_numbers_of_a_drafter_are_one_line():
    """Each in plain steps of its own; a cascade has a line for each of its drafters."""
    methods = config()["methods"] | {"both": {"drafter": "a+b", "num_draft_tokens": "auto"}}
    costs = {
        "lookup:1": RoundCosts((512,), (0, 1), ("x",), (((0.1, 0.11),),)),
        "lookup:3": RoundCosts((512,), (0, 3), ("x",), (((0.2, 0.25),),), ((0.002,),)),
        "both": RoundCosts((512, 2048), (0, 1), ("a", "b"), (((0.1, 0.2), (0.1, 0.3)),) * 2),
        "gone": RoundCosts((512,), (0, 1), ("x",), (((0.1, 0.1),),)),
    }
    lines = cost_lines(methods, costs)
    assert list(lines) == [("lookup", 512), ("both: a", 512), ("both: b", 512),
                           ("both: a", 2048), ("both: b", 2048)]  # fmt: skip
    assert lines["lookup", 512] == {-1: [0.0, 0.002], 0: [0.1, 0.2], 1: [pytest.approx(1.1)],
                                    3: [1.25]}  # fmt: skip
    assert lines["both: b", 2048][1] == [pytest.approx(3)]

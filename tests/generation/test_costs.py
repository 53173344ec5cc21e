"""Recorded costs: interpolation, the file, what is wrong with it; what follows by category."""

import dataclasses
import json
import math

import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.generation.auto import recall_or_measure
from jspec.generation.costs import RoundCosts, read_costs
from jspec.generation.monitor import AcceptanceMonitor
from jspec.generation.request import SamplingParams
from jspec.generation.result import Result, RoundCounts, Stats

COSTS = RoundCosts(
    contexts=(512, 2048),
    numbers=(0, 1, 3),
    drafters=("lookup", "model"),
    seconds=(((1.0, 1.1, 1.3), (1.0, 1.5, 2.5)), ((2.0, 2.2, 2.6), (2.0, 3.0, 5.0))),
    reading=((0.0, 0.1), (0.0, 0.3)),
)


def test_costs_are_linear_between_contexts():
    """And above them; below the first one as there, where the fixed part of a round rules."""
    np.testing.assert_allclose(COSTS.at(1280), [[1.5, 1.65, 1.95], [1.5, 2.25, 3.75]])
    np.testing.assert_allclose(COSTS.at(64), COSTS.at(512))
    np.testing.assert_allclose(COSTS.at(3584)[1], [3, 4.5, 7.5])
    np.testing.assert_allclose(COSTS.reading_at(1280), [0, 0.2])
    np.testing.assert_allclose(COSTS.reading_at(64), [0, 0.1])
    single = {"seconds": COSTS.seconds[:1], "reading": COSTS.reading[:1]}
    single = dataclasses.replace(COSTS, contexts=(512,), **single)
    np.testing.assert_allclose(single.at(9999), COSTS.at(512))
    np.testing.assert_allclose(single.reading_at(9999), COSTS.reading_at(512))


def test_costs_without_reading_have_none_of_it():
    """Those of drafters that read nothing, and of earlier records."""
    record = COSTS.to_json()
    del record["reading"]
    np.testing.assert_array_equal(RoundCosts.from_json(record).reading_at(700), [0, 0])


def test_they_survive_json():
    """An answer's settings hold them, so that its run can be repeated elsewhere."""
    assert RoundCosts.from_json(json.loads(json.dumps(COSTS.to_json()))) == COSTS
    measured = dataclasses.replace(
        COSTS, accepted=((3.0, 1.0),), decided=((4.0, 1.0),), answer_tokens=5
    )
    assert RoundCosts.from_json(json.loads(json.dumps(measured.to_json()))) == measured


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"seconds": (((1.0, second, 1.3),) * 2,) * 2}, "above 0") for second in (0.0, math.nan)),
        ({"seconds": (((1.0, math.inf, 1.3),) * 2,) * 2}, "above 0"),
        ({"reading": ((-0.1, 0.1),) * 2}, "not below 0"),
        ({"reading": ((math.nan, 0.1),) * 2}, "not below 0"),
        ({"reading": ((0.1,),) * 2}, r"seconds of reading of shape \(2, 2\), got \(2, 1\)"),
        ({"accepted": ((3.0, 1.0),)}, "decided drafts of shape"),
        ({"accepted": ((3.0, 1.0),), "decided": ((2.0, 1.0),)}, "from 0 to the number decided"),
        ({"accepted": ((-1.0, 1.0),), "decided": ((2.0, 1.0),)}, "from 0 to the number decided"),
        ({"accepted": ((1.0,),), "decided": ((2.0,),)}, "accepted drafts of shape"),
        ({"answer_tokens": -1}, "answer_tokens of at least 0"),
    ],
)
def test_impossible_costs_are_refused(changes, message):
    """Guards against a division by 0 on the device."""
    with pytest.raises(InputError, match=message):
        dataclasses.replace(COSTS, **changes)


def test_rounds_cost_plain_steps():
    """Of their own drafter, at the next number that was measured; a plain round costs 1."""
    model = [RoundCounts(3, 1, "model"), RoundCounts(2, 0, "model"), RoundCounts(0, 0)]
    assert COSTS.plain_steps(model, 512) == pytest.approx((2.5 + 2.5 + 1) / 3)
    assert COSTS.plain_steps([RoundCounts(1, 1, "lookup")], 512) == pytest.approx(1.1)
    assert COSTS.plain_steps([RoundCounts(9, 9, "lookup")], 512) == pytest.approx(1.3)
    assert COSTS.plain_steps([], 512) is None
    assert COSTS.plain_steps([RoundCounts(1, 1, "eagle")], 512) is None


def never():
    raise AssertionError("measured again")


def test_they_are_measured_once(tmp_path, capsys):
    """By key: another machine or another drafter measures for itself and keeps the others'."""
    path = tmp_path / "new" / "costs.json"
    assert recall_or_measure(path, {"a": 1}, lambda: COSTS) == COSTS
    assert "measuring" in capsys.readouterr().err
    costs = RoundCosts((512,), (0, 1), ("x",), (((1.0, 2.0),),))
    assert recall_or_measure(path, {"a": 2}, lambda: costs) == costs
    assert recall_or_measure(path, {"a": 1}, never) == COSTS
    assert recall_or_measure(path, {"a": 2}, never) == costs
    (tmp_path / "file").write_text("")
    assert recall_or_measure(tmp_path / "file" / "costs.json", {}, lambda: COSTS) == COSTS
    assert "cannot keep costs" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b""])
def test_a_corrupt_file_is_begun_anew_with_a_word(tmp_path, capsys, content):
    """Guards against a traceback at every start until someone deletes the file."""
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    assert recall_or_measure(path, {"a": 1}, lambda: COSTS) == COSTS
    errors = capsys.readouterr().err
    assert f"note: {path}: " in errors
    assert ": begun anew\n" in errors
    assert recall_or_measure(path, {"a": 1}, never) == COSTS


@pytest.mark.parametrize("entry", [None, [], {"contexts": [1]}, COSTS.to_json() | {"numbers": [0]}])
def test_a_corrupt_entry_is_measured_anew(tmp_path, capsys, entry):
    path = tmp_path / "costs.json"
    recall_or_measure(path, {"b": 1}, lambda: COSTS)
    entries = json.loads(path.read_text()) | {json.dumps({"a": 1}): entry}
    path.write_text(json.dumps(entries))
    assert recall_or_measure(path, {"a": 1}, lambda: COSTS) == COSTS
    assert "measuring anew" in capsys.readouterr().err
    assert recall_or_measure(path, {"b": 1}, never) == COSTS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"{", "costs.json: expected costs of rounds, a JSON object, got broken"),
        (b"{}", "costs.json: expected costs of rounds"),
    ],
)
def test_a_given_file_must_hold_costs(tmp_path, content, message):
    """It is not replaced: someone meant it."""
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_costs(str(path))


MONITORED = RoundCosts((512,), (0, 1, 3, 7), ("x",), (((1.0, 1.1, 1.3, 1.7),),))


def answer(category, rounds):
    counts = tuple(RoundCounts(*pair, "x" if pair[0] else "") for pair in rounds)
    stats = Stats(counts, 1, 0.0, 1.0, 1.0, 0.0, 7)
    return Result("", [], [], "", "eos", SamplingParams(), stats, category=category)


def recommend(rounds, costs=MONITORED):
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
        costs = dataclasses.replace(MONITORED, numbers=(0, 3), seconds=(((1.0, 1.3),),),
                                    reading=((0.5,),))  # fmt: skip
        monitor = AcceptanceMonitor()
        drafted = answer("qa", [(3, 3)] * 30)
        monitor.add(dataclasses.replace(drafted, prompt_token_ids=[1] * prompt))
        (recommendation,) = monitor.recommend(costs)
        assert recommendation[-2:] == (number, pytest.approx(speedup))


def test_too_little_is_no_reason():
    """Guards against a recommendation from one answer of three rounds."""
    recommendation = recommend([(7, 7)] * 3)
    assert recommendation[2:] == (1.0, None, None)
    assert str(recommendation) == "qa: 100% of drafts accepted in 3 rounds"
    without_costs = recommend([(7, 7)] * 30, costs=None)
    assert (without_costs.num_draft_tokens, without_costs.acceptance_rate) == (None, 1.0)


def test_categories_are_apart():
    monitor = AcceptanceMonitor()
    for category, kept in (("qa", 0), ("code", 7), ("qa", 0), (None, 7)):
        monitor.add(answer(category, [(7, kept)] * 12))
    by_category = {
        recommendation.category: recommendation for recommendation in monitor.recommend(MONITORED)
    }
    assert list(by_category) == ["qa", "code", "all"]
    assert (by_category["qa"].num_rounds, by_category["qa"].num_draft_tokens) == (24, 0)
    assert (by_category["code"].num_rounds, by_category["code"].num_draft_tokens) == (12, None)
    assert str(by_category["qa"]).endswith("off: drafting does not pay")

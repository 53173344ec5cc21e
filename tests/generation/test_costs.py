"""Recorded costs: interpolation, the file, and what is wrong with it."""

import dataclasses
import json

import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.generation.auto import recall_or_measure
from jspec.generation.costs import RoundCosts, read_costs
from jspec.generation.result import RoundCounts

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
    "changes",
    [
        {"accepted": ((3.0, 1.0),)},
        {"accepted": ((3.0, 1.0),), "decided": ((2.0, 1.0),)},
        {"accepted": ((-1.0, 1.0),), "decided": ((2.0, 1.0),)},
        {"accepted": ((1.0,),), "decided": ((2.0,),)},
        {"answer_tokens": -1},
    ],
)
def test_impossible_numbers_of_accepted_drafts_are_refused(changes):
    with pytest.raises(InputError, match=r"^expected "):
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


def test_a_folder_that_cannot_be_written_costs_a_word(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "costs.json"
    assert recall_or_measure(path, {}, lambda: COSTS) == COSTS
    assert "cannot keep costs" in capsys.readouterr().err


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


@pytest.mark.parametrize("second", [0.0, -1.0, float("nan"), float("inf")])
def test_costs_are_positive(second):
    """Guards against a division by 0 on the device."""
    with pytest.raises(InputError, match="above 0"):
        RoundCosts((512,), (0, 1), ("x",), (((1.0, second),),))


@pytest.mark.parametrize(
    ("reading", "message"),
    [
        (((-0.1,),), "not below 0"),
        (((float("nan"),),), "not below 0"),
        (((0.1, 0.1),), r"seconds of reading of shape \(1, 1\), got \(1, 2\)"),
    ],
)
def test_reading_takes_no_less_than_no_time(reading, message):
    with pytest.raises(InputError, match=message):
        RoundCosts((512,), (0, 1), ("x",), (((1.0, 2.0),),), reading)

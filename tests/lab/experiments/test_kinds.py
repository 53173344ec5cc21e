"""The kinds that compute, and do not time."""

import pytest

from jspec.lab.experiments.run import run_experiment
from tests.lab.experiments.tiny import done_cells, read_lines

TABLE_FIELDS = {"columns", "units", "rows", "notes"}


def check_table(record):
    """Checks the form of a table."""
    assert set(record) == TABLE_FIELDS
    assert len(record["columns"]) == len(record["units"])
    assert record["rows"]
    assert all(len(row) == len(record["columns"]) for row in record["rows"])


def test_theory(tmp_path):
    """Guards against a name that has no table."""
    assert run_experiment({"kind": "theory"}, str(tmp_path)) == 0
    records = done_cells(tmp_path)
    assert list(records) == ["table1", "figure2", "figure3", "figure4"]
    for record in records.values():
        check_table(record)
    assert records["table1"]["rows"][0] == [0.6, 2, 1.53, 1.96]


def test_predict(tmp_path):
    """Guards against a pair whose fields predict_table does not know."""
    machine = {"bandwidth": 1e11, "flop_rate": 1e13}
    pairs = {"a": machine, "b": machine | {"target": "llama3.1-8b", "draft_quantization": "int4"}}
    assert run_experiment({"kind": "predict", "predict": pairs}, str(tmp_path)) == 0
    records = done_cells(tmp_path)
    assert list(records) == ["a", "b"]
    for record in records.values():
        check_table(record)


def test_a_draft_temperature_is_that_of_the_estimated_distribution(config, tmp_path, folder):
    """Guards against one that plain decoding refuses, or that goes with the answer's settings."""
    settings = {
        "same": {"temperature": 1.0},
        "cool": {"temperature": 1.0, "draft_temperature": 0.3},
    }
    methods = {"self": {"drafter": "model", "draft": str(folder)}}
    plain = config(
        kind="estimate", methods=methods, settings=settings, num_prompts=1, max_new_tokens=20
    )
    assert run_experiment(plain, str(tmp_path / "work")) == 0
    records = done_cells(tmp_path / "work")
    same, cool = (records[f"self/{name}/prompt 0/seed 0"] for name in settings)
    assert same["num_places"] == cool["num_places"]
    assert same["sum_overlap"] == pytest.approx(same["num_places"], rel=1e-3)
    assert cool["sum_overlap"] < 0.95 * cool["num_places"]


def test_estimate(config, tmp_path, folder):
    """Guards against sums that are no sums of probabilities, and a draft that is not itself."""
    methods = {
        "self": {"drafter": "model", "draft": str(folder)},
        "lookup": {"drafter": "prompt_lookup"},
        "random": {"drafter": "random"},
    }
    plain = config(kind="estimate", methods=methods, max_new_tokens=20)
    assert run_experiment(plain, str(tmp_path / "work")) == 0
    (run,) = read_lines(tmp_path / "work" / "runs.jsonl")
    assert run["described"]["self"]["draft"] == str(folder)
    records = done_cells(tmp_path / "work")
    assert len(records) == 4 * 2 * 3
    for name, record in records.items():
        assert record["category"] in ("a", "b")
        assert 0 <= record["sum_overlap"] <= record["num_places"] + 1e-6
        assert record["num_places"] <= record["num_tokens"]
        assert [one["lenience"] for one in record["lenience"]] == [1.0, 0.5, 0.3, 0.1]
        assert sum(record["entropy"]["counts"]) == record["num_places"]
        if name.startswith("self"):
            assert record["sum_overlap"] == pytest.approx(record["num_places"], rel=1e-3)

"""The kinds that compute, and do not time."""

import pytest

from jspec.lab.experiments.run import run_experiment
from tests.lab.experiments.tiny import done_cells
from tests.programs import read_lines

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


def test_predict(tmp_path, capsys):
    """Guards against a pair whose fields predict_table does not know, and against "1 cells"."""
    machine = {"bandwidth": 1e11, "flop_rate": 1e13}
    for pair in (machine, machine | {"target": "llama3.1-8b", "draft_quantization": "int4"}):
        work = tmp_path / str(len(pair))
        assert run_experiment({"kind": "predict", "predict": {"a": pair}}, str(work)) == 0
        output, errors = capsys.readouterr()
        assert (output, errors) == (f"{work}: 1 of 1 cell is done\n", "1 of 1 cell\n")
        check_table(done_cells(work)["a"])


def test_estimate(config, tmp_path, folder):
    """Guards against sums that are no sums of probabilities, and a draft that is not itself.

    A draft temperature is that of the estimated distribution: plain decoding, which gives the
    answers, would refuse it.
    """
    methods = {
        "self": {"drafter": "model", "draft": str(folder)},
        "lookup": {"drafter": "prompt_lookup"},
        "random": {"drafter": "random"},
    }
    settings = {
        "same": {"temperature": 1.0},
        "cool": {"temperature": 1.0, "draft_temperature": 0.3},
    }
    plain = config(kind="estimate", methods=methods, settings=settings, max_new_tokens=20)
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
        if name.startswith("self/same"):
            assert record["sum_overlap"] == pytest.approx(record["num_places"], rel=1e-3)
        if name == "self/cool/prompt 0/seed 0":
            assert record["sum_overlap"] < 0.95 * record["num_places"]

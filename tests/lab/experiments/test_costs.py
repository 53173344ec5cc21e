"""Costs of rounds belong to the workdir: a resumed run takes the same choices."""

import json

import pytest

from jspec.common.errors import WorkdirError
from jspec.generation.auto import KnownCosts
from jspec.generation.costs import RoundCosts
from jspec.lab.experiments.run import run_experiment
from jspec.lab.experiments.workers import recorded_costs
from tests.lab.experiments.tiny import done_cells
from tests.programs import read_lines

NUMBERS = (0, 1, 3, 7)


def costs_of(per_draft):
    rounds = tuple(0.01 * (1 + per_draft * number) for number in NUMBERS)
    return RoundCosts((512,), NUMBERS, ("prompt_lookup",), ((rounds,),))


def test_costs_are_measured_once_for_each_method_and_batch_size(tmp_path):
    """Guards against a second measurement, and one batch size's costs taken for another's."""
    path, measured = tmp_path / "costs.json", []

    def measure(costs):
        def now():
            measured.append(costs)
            return costs

        return now

    cheap, dear = costs_of(0.1), costs_of(2.0)
    assert recorded_costs(path, "a", 1, measure(cheap)) == cheap
    assert recorded_costs(path, "a", 1, measure(dear)) == cheap
    assert recorded_costs(path, "a", 8, measure(dear)) == dear
    assert recorded_costs(path, "b", 1, measure(dear)) == dear
    assert recorded_costs(path, "a", 1, measure(dear)) == cheap
    assert measured == [cheap, dear, dear]
    assert set(json.loads(path.read_text())) == {"a", "b"}
    assert recorded_costs(path, "none", 1, lambda: None) is None


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 3}'])
def test_damaged_costs_are_an_error(tmp_path, content):
    """Guards against other choices in the second half of a run than in the first."""
    path = tmp_path / "costs.json"
    path.write_text(content)
    with pytest.raises(WorkdirError, match="cannot read"):
        recorded_costs(path, "a", 1, lambda: costs_of(0.1))


def test_the_workdirs_costs_decide(config, tmp_path):
    """Guards against a resumed run that chooses by its own costs: drafts are free by these."""
    methods = {"auto": {"drafter": "prompt_lookup", "num_draft_tokens": "auto"}}
    plain = config(methods=methods, settings={"T=0": {}}, num_prompts=1)
    free = costs_of(0.0)
    (tmp_path / "costs.json").write_text(json.dumps({"auto": {"1": free.to_json()}}))
    assert run_experiment(plain, str(tmp_path)) == 0
    (run,) = read_lines(tmp_path / "runs.jsonl")
    assert RoundCosts.from_json(run["described"]["auto"]["costs"]) == free
    (record,) = done_cells(tmp_path).values()
    assert any(number for number, *_ in record["answers"][0]["rounds"])


@pytest.mark.slow
def test_costs_are_measured_into_the_workdir(config, tmp_path, monkeypatch, capsys):
    """Guards against costs that stay in the user's cache, where another run may change them."""
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "cache"))
    methods = {"plain": {"drafter": "none"},
            "auto": {"drafter": "prompt_lookup", "num_draft_tokens": "auto"}}  # fmt: skip
    work = tmp_path / "work"
    settings = {"T=0": {}, "T=1": {"temperature": 1.0}}
    for part in ({"T=0": {}}, settings):
        plain = config(methods=methods, settings=part, num_prompts=1, max_seq_len=64)
        if part is settings:  # as if the first run had been killed
            (work / "config.json").write_text(json.dumps(plain))
        assert run_experiment(plain, str(work)) == 0
    assert capsys.readouterr().err.count("measuring what rounds") == 1
    costs = RoundCosts.from_json(json.loads((work / "costs.json").read_text())["auto"]["1"])
    runs = read_lines(work / "runs.jsonl")
    assert len(runs) == 2
    for run in runs:
        assert RoundCosts.from_json(run["described"]["auto"]["costs"]) == costs


def test_costs_of_a_fixed_number_are_measured_where_they_are_wanted(config, tmp_path, monkeypatch):
    """What the report's expectations are made of; they decide nothing."""
    made = RoundCosts((64,), (0, 2), ("prompt_lookup",), (((0.01, 0.02),),))
    monkeypatch.setattr(KnownCosts, "measure", lambda self: made)
    methods = {"lookup": {"drafter": "prompt_lookup", "num_draft_tokens": 2}}
    plain = config(methods=methods, settings={"T=0": {}}, num_prompts=1, measure_costs=True)
    assert run_experiment(plain, str(tmp_path)) == 0
    entries = json.loads((tmp_path / "costs.json").read_text())
    assert RoundCosts.from_json(entries["lookup"]["1"]) == made
    (run,) = read_lines(tmp_path / "runs.jsonl")
    assert run["described"]["lookup"]["costs"] is None

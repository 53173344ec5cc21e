"""Reading the folder of an experiment, whole or damaged."""

import json

import pytest

from jspec.common.errors import InputError
from jspec.lab.reports.scene import answers_by_prompt, parse_cells
from jspec.lab.reports.workdir import origin_blocks, read_workdir
from tests.lab.reports.workdirs import RUN, cell, cells, failed_cell, trace, write


def test_a_workdir_is_read(tmp_path):
    """Guards against cells, runs or traces that get lost."""
    folder = write(tmp_path, [*cells(), failed_cell()], traces=[trace(), trace()])
    workdir = read_workdir(folder)
    assert len(workdir.done) == 72
    assert [line["cell"] for line in workdir.failed] == ["lookup:1/T=0/broken"]
    assert len(workdir.runs) == 1
    assert len(workdir.traces) == 2
    assert workdir.notes == []


def test_a_torn_last_line_is_left_out_and_noted(tmp_path):
    """Guards against a report that a killed run makes impossible."""
    torn = json.dumps(cell("plain", [0]))[:40]
    workdir = read_workdir(write(tmp_path, cells(), tail=torn))
    assert len(workdir.done) == 72
    assert workdir.notes == ["line 73 of results.jsonl is torn or broken and was left out"]


_NO_CELLS = "[1]", '{"cell": 3}', '{"cell": "a", "status": "done"}', "{" * 9, "[" * 100_000


@pytest.mark.parametrize("line", _NO_CELLS, ids=range(len(_NO_CELLS)))
def test_a_line_that_is_no_cell_is_left_out(tmp_path, line):
    """Guards against a crash on what another program has written."""
    workdir = read_workdir(write(tmp_path, cells(), tail=line + "\n"))
    assert len(workdir.done) == 72
    assert len(workdir.notes) == 1


def test_a_cell_that_was_done_after_all_has_not_failed(tmp_path):
    """A failed cell is tried again by the next run: it must count once."""
    done = cell("plain", [0])
    workdir = read_workdir(write(tmp_path, [failed_cell(done["cell"]), done]))
    assert workdir.failed == []
    assert len(workdir.done) == 1


def test_what_is_no_workdir_is_refused(tmp_path):
    """Guards against an empty report on the wrong folder."""
    with pytest.raises(InputError, match="no such folder"):
        read_workdir(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"cannot read .*config\.json"):
        read_workdir(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="broken JSON"):
        read_workdir(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match="expected an object"):
        read_workdir(tmp_path)


def test_a_folder_without_results_is_an_experiment_that_has_not_begun(tmp_path):
    """Guards against an error before the first cell is finished."""
    (tmp_path / "config.json").write_text("{}")
    workdir = read_workdir(tmp_path)
    assert (workdir.runs, workdir.done, workdir.failed) == ([], [], [])


def test_repeats_do_not_count_twice():
    """A repeat gives the same answers again; seeds of one prompt belong together."""
    plain = [cell for cell in parse_cells(cells()) if cell.method == "plain"]
    assert sum(map(len, answers_by_prompt(plain))) == 6
    seeds = parse_cells([cell("plain", [2], seed=seed) for seed in (0, 1)])
    assert [len(group) for group in answers_by_prompt(seeds)] == [2]


def test_costs_are_read_and_broken_ones_noted(tmp_path):
    """Guards against a report that costs.json makes impossible, or costs of another batch size."""
    folder = write(tmp_path, cells())
    assert read_workdir(folder).costs == {}
    seconds = {"contexts": [512], "numbers": [0, 3], "drafters": ["x"], "seconds": [[[0.1, 0.2]]]}
    entries = {"lookup:3": {"1": seconds, "8": seconds | {"seconds": [[[0.3, 0.4]]]}}}
    (folder / "costs.json").write_text(json.dumps(entries))
    costs = read_workdir(folder).costs["lookup:3"]
    assert [costs[size].seconds[0][0] for size in (1, 8)] == [(0.1, 0.2), (0.3, 0.4)]
    for broken in ("{", "[]", '{"a": 3}', '{"a": {"1": {}}}', '{"a": {"x": {}}}', "[" * 100_000):
        (folder / "costs.json").write_text(broken)
        workdir = read_workdir(folder)
        assert workdir.costs == {}
        assert workdir.notes == ["costs.json is broken and was left out"]


def test_the_origin_of_a_run_may_be_unknown(tmp_path):
    """Guards against a report that a line without a field makes impossible."""
    workdir = read_workdir(write(tmp_path, cells(), runs=[{}, RUN | {"environment": {}}]))
    _, commands, (*dates, _, _) = origin_blocks(workdir)
    assert "--workdir=DIR" in commands.text
    assert dates == [": ", "2026-11-22: git commit `0123456789ab`, with changes that are not "
                     "committed"]  # fmt: skip


def test_the_number_of_cells_is_what_a_run_says(tmp_path):
    """Several processes may have worked on it."""
    for said, expected in (([], 0), ([{"num_cells": 72}] * 2, 72)):
        assert read_workdir(write(tmp_path, cells(), runs=said)).num_cells == expected

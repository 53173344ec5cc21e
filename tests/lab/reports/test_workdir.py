"""Reading the folder of an experiment, whole or damaged."""

import json

import pytest

from jspec.common.errors import InputError
from jspec.lab.reports.scene import answers_by_prompt, parse_cells
from jspec.lab.reports.workdir import origin_blocks, read_workdir
from tests.lab.reports.workdirs import RUN, cell, cells, failed_cell, trace, write


def test_a_workdir_is_read(tmp_path):
    """Guards against cells, runs or traces that get lost. Several processes may have worked on it;
    before they have, there are no results.
    """
    runs = [RUN | {"num_cells": 73}] * 2
    folder = write(tmp_path, [*cells(), failed_cell()], runs=runs, traces=[trace(), trace()])
    workdir = read_workdir(folder)
    assert len(workdir.done) == 72
    assert [line["cell"] for line in workdir.failed] == ["lookup:1/T=0/broken"]
    assert [len(workdir.runs), len(workdir.traces), workdir.num_cells] == [2, 2, 73]
    assert workdir.notes == []
    for name in ("runs.jsonl", "results.jsonl"):
        (folder / name).unlink()
    workdir = read_workdir(folder)
    assert (workdir.runs, workdir.done, workdir.failed, workdir.num_cells) == ([], [], [], 0)


_NO_CELLS = (
    json.dumps(cell("plain", [0]))[:40], "[1]", '{"cell": 3}', '{"cell": "a", "status": "done"}',
    "[" * 100_000,
)  # fmt: skip


@pytest.mark.parametrize("line", _NO_CELLS, ids=range(len(_NO_CELLS)))
def test_a_line_that_is_torn_or_no_cell_is_left_out_and_noted(tmp_path, line):
    """Guards against a report that a killed run, or another program, makes impossible."""
    workdir = read_workdir(write(tmp_path, cells(), tail=line))
    assert len(workdir.done) == 72
    assert workdir.notes == ["line 73 of results.jsonl is torn or broken and was left out"]


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
    with pytest.raises(InputError, match="damaged JSON"):
        read_workdir(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match="expected a JSON object"):
        read_workdir(tmp_path)


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

"""What of a folder is published: enough for the same report, and nothing of the machine."""

import gzip
import json

import pytest

from jspec.common.errors import InputError
from jspec.lab.reports.report import publish
from jspec.lab.reports.workdir import portable, read_workdir
from tests.lab.reports.workdirs import cells, config, failed_cell, trace, write

COSTS = {
    "contexts": [512],
    "numbers": [0, 3],
    "drafters": ["prompt_lookup"],
    "seconds": [[[0.1, 0.2]]],
}


def content(folder):
    """Returns the files under a folder by their names."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def folder(tmp_path):
    """Returns an experiment's folder, with a torn line and files that nobody wants to keep."""
    lines = [*cells(repeats=1), failed_cell()]
    fields = config(prompts_file="/home/someone/secret/p.jsonl")
    path = write(tmp_path / "run", lines, traces=[trace()], tail='{"torn', config_fields=fields)
    (path / "costs.json").write_text(json.dumps({"lookup:3": {"1": COSTS}}))
    for name in ("table.safetensors", "locks", "mine.html"):
        (path / name).write_text("big")
    return path


def test_the_report_made_anew_is_the_same(folder, tmp_path):
    """Guards against a number whose data is lost, and a home directory in a public file."""
    out = tmp_path / "benchmarks" / "run"
    before = content(folder)
    files = publish(folder, out)
    first = content(out)
    assert content(folder) == before
    assert {str(path.relative_to(out)) for path in files} == first.keys()
    names = {name for name in first if not name.startswith("figures/")}
    assert names == {
        "report.md", "tables.csv", "config.json", "runs.jsonl", "costs.json", "trace.json",
        "results.jsonl.gz",
    }  # fmt: skip
    assert all(name.endswith(".png") for name in first.keys() - names)
    assert len(first) > len(names)
    assert gzip.decompress(first["results.jsonl.gz"]) == before["results.jsonl"]
    assert read_workdir(out).done == read_workdir(folder).done
    publish(out, out)
    assert content(out) == first
    written = first | {"results.jsonl.gz": before["results.jsonl"]}
    assert not any(b"secret" in one or b"someone" in one for one in written.values())
    assert json.loads(written["config.json"])["prompts_file"] == "p.jsonl"
    assert "--workdir=DIR" in json.loads(written["runs.jsonl"])["argv"]


def test_what_is_no_path_stays():
    """Guards against a pattern, a hub name or a sentence that is cut."""
    kept = ["a/b", "runs/x", "/[a-z]+/x", "/end", "and/or, 1/2", "~", 3, None, True,
            {"x": "meta/y"}, "--config=configs/predict.py:a/b,c", "--x=a / b"]  # fmt: skip
    assert portable(kept) == kept
    cut = {"/a/b.json": "b.json", "~/a/b": "b", "../../c": "c", "/x/configs/y.py": "configs/y.py",
           "--config=/x/configs/y.py": "--config=configs/y.py", "--workdir=r": "--workdir=DIR",
           "--config.methods.a.draft=/m/draft/": "--config.methods.a.draft=draft"}  # fmt: skip
    assert portable(list(cut)) == list(cut.values())


def test_a_run_is_not_overwritten(folder):
    """Guards against a config without its paths, with which the run could not go on."""
    before = content(folder)
    with pytest.raises(InputError, match="expected a folder to publish into, got that of a run"):
        publish(folder, folder)
    assert content(folder) == before


def test_bad_folders_are_told(folder, tmp_path):
    """Guards against a traceback."""
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot publish to"):
        publish(folder, tmp_path / "file" / "out")
    packed = folder / "results.jsonl.gz"
    (folder / "results.jsonl").unlink()
    for broken in (b"none", gzip.compress(b"x" * 999)[:-9]):
        packed.write_bytes(broken)
        with pytest.raises(InputError, match=r"cannot read .*results\.jsonl\.gz: "):
            read_workdir(folder)


def test_results_that_are_not_packed_come_first(folder):
    """Guards against the numbers of an earlier day, where somebody packed them by hand."""
    (folder / "results.jsonl.gz").write_bytes(gzip.compress(b""))
    assert len(read_workdir(folder).done) == 24

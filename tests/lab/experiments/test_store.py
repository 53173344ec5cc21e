"""Workdirs, and processes that share them."""

import json
import subprocess
import sys

import pytest

from jspec.common.errors import WorkdirError
from jspec.lab.experiments.store import Store
from tests.programs import read_lines

CONFIG = {"kind": "generate", "max_new_tokens": 64, "methods": {"a": {"n": 1}, "b": {"n": 2}}}

# A process that does cells: each takes a moment, and notes who did it.
_WORK = """
import json, pathlib, sys, time
from jspec.lab.experiments.store import Store
folder, me, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
go = pathlib.Path(folder).parent / "go"
with Store(folder, json.loads(sys.argv[4])) as store:
    print("ready", flush=True)
    while not go.exists():
        time.sleep(0.01)
    names = [f"cell {number}" for number in range(count)]
    while any(name not in store.outcomes for name in names):
        for name in names:
            with store.claim(name) as is_ours:
                if is_ours:
                    time.sleep(0.005)
                    store.add({"cell": name, "status": "done", "record": {"by": me}})
"""
_HOLD = """
import json, sys, time
from jspec.lab.experiments.store import Store
with Store(sys.argv[1], json.loads(sys.argv[2])) as store, store.claim("cell") as is_ours:
    print(is_ours, flush=True)
    time.sleep(600)
"""


def start(script, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )


def test_processes_share_the_cells(tmp_path):
    """Guards against a cell done twice, one that nobody does, and a process that does them all."""
    folder = tmp_path / "work"
    processes = [start(_WORK, folder, me, 60, json.dumps(CONFIG)) for me in "xyz"]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    (tmp_path / "go").touch()
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    lines = read_lines(folder / "results.jsonl")
    assert sorted(one["cell"] for one in lines) == sorted(f"cell {i}" for i in range(60))
    assert {one["record"]["by"] for one in lines} == set("xyz")


def test_a_killed_holders_cell_is_free_at_once(tmp_path):
    """Guards against a lock that outlives its holder."""
    with start(_HOLD, tmp_path, json.dumps(CONFIG)) as holder:
        assert holder.stdout.readline() == "True\n"
        with Store(str(tmp_path), CONFIG) as store:
            with store.claim("cell") as is_ours:
                assert not is_ours
            with store.claim("another") as is_ours:
                assert is_ours
            holder.kill()
            holder.wait()
            with store.claim("cell") as is_ours:
                assert is_ours


def test_a_finished_cell_is_not_taken_again(tmp_path):
    """Guards against a cell done twice because somebody finished it after we had looked."""
    with Store(str(tmp_path), CONFIG) as store:
        with store.claim("cell") as is_ours:
            assert is_ours
            store.add({"cell": "cell", "status": "done"})
        with store.claim("cell") as is_ours:
            assert not is_ours
    with Store(str(tmp_path), CONFIG) as store:
        assert store.outcomes == {"cell": "done"}


def test_a_failed_cell_is_tried_again_by_the_next_opening_only(tmp_path):
    """Guards against a loop around a cell that always fails, and one that is never tried again."""
    with Store(str(tmp_path), CONFIG) as store:
        store.add({"cell": "cell", "status": "failed"})
        with store.claim("cell") as is_ours:
            assert not is_ours
    with Store(str(tmp_path), CONFIG) as store:
        assert store.outcomes == {}
        store.add({"cell": "cell", "status": "done"})
        store.add({"cell": "cell", "status": "failed"})
        assert store.outcomes == {"cell": "done"}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_new_tokens": 32}, "max_new_tokens is 64 there and 32 here"),
        ({"title": "t"}, 'title is absent there and "t" here'),
        (
            {"methods": {"a": {"n": 1}, "b": {"n": "auto"}}},
            'methods.b.n is 2 there and "auto" here',
        ),
        ({"methods": {"b": {"n": 2}, "a": {"n": 1}}}, 'the order of methods is ["a", "b"] there'),
    ],
)
def test_a_workdir_of_another_config_is_refused(tmp_path, change, named):
    """Guards against results of two configs in one file, and a refusal that does not say why."""
    with Store(str(tmp_path), CONFIG):
        pass
    with pytest.raises(WorkdirError) as caught:
        Store(str(tmp_path), CONFIG | change)
    assert f"belongs to another config: {named}" in str(caught.value)
    with Store(str(tmp_path), CONFIG):  # the same one is welcome
        pass


def test_a_refusal_says_which_command_continues_the_folder(tmp_path):
    """Guards against a published folder that nobody can continue without its overrides."""
    argv = ["python", "-m", "jspec.experiment", "--config.title=a b", "--workdir=DIR"]
    with Store(str(tmp_path), CONFIG) as store:
        store.add_run({"run": "one", "argv": argv})
    with pytest.raises(WorkdirError) as caught:
        Store(str(tmp_path), CONFIG | {"max_new_tokens": 32})
    command = f"python -m jspec.experiment '--config.title=a b' --workdir={tmp_path}"
    assert str(caught.value).endswith(f"another --workdir, or continue this one with: {command}")


def test_a_workdir_that_names_tables_of_theory_goes_on(tmp_path):
    """Guards against a workdir that nobody can resume because a field without effect is gone."""
    (tmp_path / "config.json").write_text(json.dumps({"theory": {"tables": ["table1"]}} | CONFIG))
    with Store(str(tmp_path), CONFIG) as store:
        assert store.outcomes == {}


def test_a_damaged_workdir_is_one_line(tmp_path):
    """Guards against tracebacks, and against results of nobody knows what mixed with ours."""
    (tmp_path / "file").touch()
    with pytest.raises(WorkdirError, match="cannot make the workdir"):
        Store(str(tmp_path / "file" / "work"), CONFIG)
    (tmp_path / "results.jsonl").write_text('{"cell": "x", "status": "done"}\n')
    with pytest.raises(WorkdirError, match=r"holds results without their config\.json"):
        Store(str(tmp_path), CONFIG)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(WorkdirError, match="cannot read"):
        Store(str(tmp_path), CONFIG)


def test_published_results_are_not_measured_over(tmp_path):
    """Guards against a published folder whose cells are all measured again, beside the old ones."""
    (tmp_path / "results.jsonl.gz").write_bytes(b"")
    with pytest.raises(WorkdirError, match=r"published results .* expected another workdir"):
        Store(str(tmp_path), CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl.gz"]

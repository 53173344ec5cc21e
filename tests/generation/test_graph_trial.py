"""The trial that allows one graph: stand-ins for rounds, its file in the user's cache, real rounds.

A CPU passes for the GPU, and takes the options of a graph without doing anything about them.
"""

import json
import threading

import jax
import numpy as np
import pytest

from jspec import kernels
from jspec.drafters import chain as draw
from jspec.generation import graph_trial
from jspec.kernels import backend, verdicts
from jspec.models import cache
from jspec.speculation import beam
from tests.tiny_models import make_generator

_TRYING = "trying whether rounds may be one graph on this GPU, once for this driver and version"
_NUM_RUNS = 2 * 4 * 6  # with and without a graph, of four subjects
_SLOW = "the host drives its loops, and short rounds take longer"


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """Lets the default device pass for a GPU whose driver is 580.1, and counts what is compiled."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for name in ("XLA_FLAGS", "JSPEC_ONE_GRAPH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(backend, "_VERDICT", {})
    machine = {"driver": "580.1", "jaxlib": "0.12.0", "sources": "0123"}
    monkeypatch.setattr(verdicts, "_machine", lambda: machine)
    verdicts._note_once.cache_clear()


@pytest.fixture
def trial(gpu, monkeypatch, capfd):
    """Returns a function that starts anew with rounds that go wrong in some run of a graph.

    It returns whether a graph is allowed, the lines on standard error, and how many runs were made.
    """

    def start(wrong_run=None, raises=None):
        runs = []

        def make(name, options):
            is_graph = "xla_gpu_graph_min_graph_size" in options

            def run(index):
                runs.append((name, is_graph, index))  # by several threads
                if raises is not None and is_graph:
                    raise raises
                is_wrong = is_graph and index == wrong_run and name == "tree"
                return [np.arange(5) + index, np.array([2]) + is_wrong]

            return run

        monkeypatch.setattr(backend, "_VERDICT", {})
        monkeypatch.setattr(verdicts, "_VERDICTS", {})
        verdicts._note_once.cache_clear()
        monkeypatch.setattr(graph_trial, "make_runner", make)
        graph_trial.check_one_graph()
        graph_trial.check_one_graph()  # which knows by then
        is_allowed = kernels.run_options() == kernels.one_graph_options()
        assert is_allowed or kernels.run_options() is None
        assert len(set(runs)) == len(runs)
        return is_allowed, capfd.readouterr().err.splitlines(), len(runs)

    return start


def test_right_rounds_are_tried_once_for_all_starts(trial, tmp_path):
    assert trial() == (True, [_TRYING], _NUM_RUNS)
    assert trial() == (True, [], 0)
    assert {path.name for path in tmp_path.iterdir()} == {"kernels.json", "kernels.lock"}


@pytest.mark.parametrize("wrong_run", [1, 5])
def test_one_wrong_run_is_enough_and_is_remembered(trial, wrong_run):
    """Whichever it is: the second makes the graph, and later ones change its addresses."""
    reason = f"run {wrong_run + 1} of 6 with a tree gave other tokens"
    line = f"jspec: a run is not one graph ({reason}): {_SLOW}"
    assert trial(wrong_run)[:2] == (False, [_TRYING, line])
    assert trial() == (False, [line], 0)


def test_an_error_is_one_line_and_is_tried_again(trial, tmp_path):
    """As of an XLA that does not know an option, or of memory that others have taken."""
    error = jax.errors.JaxRuntimeError("INVALID_ARGUMENT: No such compile option:\n'xla_gpu_x'")
    is_allowed, lines, _ = trial(raises=error)
    assert not is_allowed
    assert lines[0] == _TRYING
    assert lines[1].startswith("jspec: the trial failed (JaxRuntimeError: INVALID_ARGUMENT: No suc")
    assert lines[1].endswith("; no graph is taken")
    assert len(lines) == 2
    content = json.loads((tmp_path / "kernels.json").read_text())
    assert [entry["verdicts"] for entry in content.values()] == [{}]
    assert trial()[0]


@pytest.mark.parametrize("name", ["driver", "jaxlib", "sources"])
def test_a_verdict_of_another_driver_or_version_is_tried_again(trial, monkeypatch, tmp_path, name):
    trial(wrong_run=2)
    machine = verdicts._machine() | {name: "new"}
    monkeypatch.setattr(verdicts, "_machine", lambda: machine)
    is_allowed, lines, num_runs = trial()
    assert (is_allowed, num_runs) == (True, _NUM_RUNS)
    assert len(lines) == 2
    assert lines[0].endswith(", now new: trials are made again")
    assert f"{name} " in lines[0]
    assert trial() == (True, [], 0)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"KIND": 3}', '{"KIND": {}}', '{"KIND": {"verdicts": null}}', "\x00"]
)
def test_a_damaged_file_is_begun_anew_with_one_line(trial, tmp_path, text):
    path = tmp_path / "kernels.json"
    path.write_text(text.replace("KIND", jax.devices()[0].device_kind))
    is_allowed, lines, num_runs = trial()
    assert (is_allowed, num_runs) == (True, _NUM_RUNS)
    assert len(lines) == 2
    assert "kernels.json" in lines[0]
    assert trial() == (True, [], 0)


def test_other_devices_verdicts_stay(trial, tmp_path):
    path = tmp_path / "kernels.json"
    path.write_text('{"NVIDIA H100": {"machine": {}, "verdicts": {}}}')
    trial()
    assert json.loads(path.read_text()).keys() == {"NVIDIA H100", jax.devices()[0].device_kind}


def test_a_file_that_cannot_be_written_is_one_line(trial, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "file" / "cache"))
    for _ in range(2):
        is_allowed, lines, num_runs = trial()
        assert (is_allowed, num_runs) == (True, _NUM_RUNS)
        assert "kernels.json" in lines[0]
        assert len(lines) <= 3
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_without_a_home_it_is_tried(trial, monkeypatch):
    monkeypatch.delenv("JSPEC_CACHE")
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "relative")
    monkeypatch.setattr("platformdirs.user_cache_path", lambda *_, **__: _Relative())
    assert trial()[0]


class _Relative:
    def is_absolute(self):
        return False


def test_the_user_and_a_cpu_need_no_trial(gpu, monkeypatch, capfd):
    def fail(name, options):
        raise AssertionError

    monkeypatch.setattr(graph_trial, "make_runner", fail)
    monkeypatch.setenv("JSPEC_ONE_GRAPH", "0")
    graph_trial.check_one_graph()
    monkeypatch.delenv("JSPEC_ONE_GRAPH")
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    graph_trial.check_one_graph()
    assert capfd.readouterr().err == ""
    assert kernels.run_options() is None


def test_a_generator_is_built_behind_the_trial(trial, monkeypatch):
    """Guards against an engine that is built before the verdict, whose run is no graph."""
    monkeypatch.setattr(backend, "_VERDICT", {})
    monkeypatch.setattr(graph_trial, "find_problem", lambda make: "")
    make_generator("none")
    assert kernels.run_options() == kernels.one_graph_options()


def test_changed_sources_are_tried_again(trial, monkeypatch):
    """Of all of jspec, its CUDA C++ too: not only those of the kernels, and not only Python."""
    folders = []

    def digest(folder):
        folders.append(folder)
        return str(len(folders))

    monkeypatch.setattr(kernels, "sources_digest", digest)
    assert trial()[2] == _NUM_RUNS
    assert trial()[2] == _NUM_RUNS
    assert [folder.name for folder in folders] == ["jspec", "jspec"]


def test_every_kind_of_source_counts(tmp_path):
    seen = {verdicts.sources_digest(tmp_path)}
    for name in ("a.py", "b.cc", "c.h", "d.cu", "e.cuh"):
        (tmp_path / name).write_text("")
        (tmp_path / name).write_text("one")
        seen.add(verdicts.sources_digest(tmp_path))
    assert len(seen) == 6
    (tmp_path / "notes.txt").write_text("one")
    assert verdicts.sources_digest(tmp_path) in seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "module"), [("tree", cache), ("chain", draw), ("head", draw), ("beams", beam)]
)
def test_real_rounds_agree_and_a_loop_that_makes_no_trip_is_seen(monkeypatch, name, module):
    """Of the negative control one loop of a graph's program is never run, as with a stale
    condition: of the path or the beams that are kept, or of draws at random.
    """
    monkeypatch.setattr(graph_trial, "_SUBJECTS", {name: graph_trial._SUBJECTS[name]})
    assert graph_trial.find_problem(graph_trial.make_runner) == ""
    run_if, wrong_thread = module.run_if, threading.local()  # the other kind is traced beside it

    def run_none(condition, function, operand):
        is_wrong = getattr(wrong_thread, "is_here", False)
        return operand if is_wrong else run_if(condition, function, operand)

    monkeypatch.setattr(module, "run_if", run_none)

    def make_wrong(name, options):
        runner = graph_trial.make_runner(name, options)

        def run(index):
            wrong_thread.is_here = "xla_gpu_graph_min_graph_size" in options
            return runner(index)

        return run

    assert "gave other tokens" in graph_trial.find_problem(make_wrong)


def test_programs_are_compiled_at_once():
    """Guards against one compilation after another, for which a user waits. All of the threads know
    that they belong to a trial.
    """
    all_together = threading.Barrier(8)

    def make(name, options):
        def run(index):
            if index == 0:
                all_together.wait(timeout=60)
                assert verdicts.is_trial()
            return [np.array([index])]

        return run

    token = verdicts._IS_TRIAL.set(True)
    try:
        assert graph_trial.find_problem(make) == ""
    finally:
        verdicts._IS_TRIAL.reset(token)


def test_what_a_subject_raises_is_raised():
    """In its first run, or in a later one; what has come from other threads hides nothing."""
    for wrong_index in (0, 3):

        def make(name, options, wrong_index=wrong_index):
            def run(index):
                if name == "head" and index == wrong_index:
                    raise ValueError("broken")
                return [np.array([index])]

            return run

        with pytest.raises(ValueError, match="broken"):
            graph_trial.find_problem(make)

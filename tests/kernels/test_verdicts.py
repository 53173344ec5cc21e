"""Trials of several processes, and of a device that gives no answer."""

import concurrent.futures
import json
import subprocess
import sys
import threading

import pytest

from jspec.common.errors import InputError
from jspec.kernels import verdicts

KEY, NAMES = ("what", 1), ["xla", "cuda"]
# Begins the trial, says so, and ends it once it is told to.
OTHER = f"""
import sys
from jspec.kernels import verdicts

def reach():
    print("begun", flush=True)
    sys.stdin.readline()
    return {{"choice": "cuda"}}

verdicts.decide({KEY}, {NAMES}, reach)
"""


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(verdicts, "_VERDICTS", {})
    monkeypatch.setattr(verdicts, "_TRIALS", {})
    yield tmp_path / "kernels.json"
    concurrent.futures.wait([future for future, _ in verdicts._TRIALS.values()], 30)


@pytest.fixture
def other():
    """Another process, in the middle of a trial."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", OTHER], **pipes) as process:
        assert process.stdout.readline() == "begun\n"
        yield process
        process.kill()


def never():
    raise AssertionError("expected no trial of this process")


def decide_in_thread():
    """Returns a thread that decides, and where its verdict will be."""
    results = []
    thread = threading.Thread(
        target=lambda: results.append(verdicts.decide(KEY, NAMES, never)), daemon=True
    )
    thread.start()
    return thread, results


def test_another_process_that_tries_is_waited_for(other, capsys):
    """Guards against its mark, taken for that of a process that has ended."""
    thread, results = decide_in_thread()
    thread.join(0.5)
    assert thread.is_alive()
    other.stdin.write("\n")
    other.stdin.flush()
    thread.join(30)
    assert results == [{"choice": "cuda"}]
    said = "jspec: waiting for another process that tries kernels\n"
    assert capsys.readouterr().err == said


def test_a_process_that_ended_in_its_trial_holds_up_nobody(other, cache, capsys):
    assert "is_unfinished" in cache.read_text()
    thread, results = decide_in_thread()
    other.kill()
    thread.join(30)
    assert results == [{"choice": "xla", "is_unfinished": True}]
    assert f"a trial did not end: xla is taken; remove {cache}" in capsys.readouterr().err


def test_a_device_that_gives_no_answer_is_not_waited_for(monkeypatch, cache):
    """Its mark stays: the next start does not try again."""
    monkeypatch.setattr(verdicts, "_PATIENCE", 0.2)
    is_over = threading.Event()
    with pytest.raises(InputError, match=r"got no answer from the device: start again, and xla is"):
        verdicts.decide(KEY, NAMES, lambda: is_over.wait() and {"choice": "cuda"})
    assert "is_unfinished" in cache.read_text()
    is_over.set()


@pytest.mark.parametrize("seconds", [0.0, 300.0])
def test_a_late_interrupt_is_taken_for_a_device_that_hangs(seconds, monkeypatch, cache):
    """An early one is not; the trial goes on meanwhile, as in a notebook, and keeps its verdict."""
    monkeypatch.setattr(verdicts, "_LONG", seconds)
    is_begun, is_over = threading.Event(), threading.Event()

    def reach():
        is_begun.set()
        is_over.wait()
        return {"choice": "cuda"}

    def interrupt(futures, timeout):
        is_begun.wait()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(verdicts, "_wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            verdicts.decide(KEY, NAMES, reach)
    (entry,) = json.loads(cache.read_text()).values()
    marks = [verdict.get("is_unfinished") for verdict in entry["verdicts"].values()]
    assert marks == ([True] if seconds == 0 else [])
    is_over.set()
    assert verdicts.decide(KEY, NAMES, never) == {"choice": "cuda"}


def test_a_trial_may_need_another(cache):
    """In a thread of its own, as `choose_weights` does."""

    def reach():
        inner = verdicts.decide(("inner",), NAMES, lambda: {"choice": "cuda"})
        return {"choice": inner["choice"]}

    assert verdicts.decide(KEY, NAMES, reach) == {"choice": "cuda"}

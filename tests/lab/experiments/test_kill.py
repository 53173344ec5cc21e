"""Runs that are killed, and processes that share a run, through the program."""

import itertools
import json
import random
import signal
import subprocess
import time

import jax
import numpy as np
import pytest
import safetensors.numpy

from jspec.generation.costs import RoundCosts
from tests.lab.experiments.tiny import (
    TINY_PROMPTS,
    done_cells,
    plain_config,
    without_times,
    write_config,
)
from tests.programs import command, environment, run, write_lines

pytestmark = pytest.mark.slow  # test_run.py and test_store.py break runs off within this process
NUM_CELLS = 48
NUMBERS = (0, 1, 3, 7)
COSTS = RoundCosts((512,), NUMBERS, ("prompt_lookup",), (((0.01, 0.011, 0.012, 0.013),),))
METHODS = {
    "plain": {"drafter": "none"},
    "lookup": {"drafter": "prompt_lookup", "num_draft_tokens": 3},
    "auto": {"drafter": "prompt_lookup", "num_draft_tokens": "auto"},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("kill")


@pytest.fixture(scope="module")
def env(compile_cache, home):
    return environment(compile_cache, home / "cache")


@pytest.fixture(scope="module")
def config_file(folder, home):
    prompts = write_lines(home / "prompts.jsonl", TINY_PROMPTS)
    plain = plain_config(folder, prompts, methods=METHODS, seeds=[0, 1], turns=0)
    return write_config(home / "config.py", plain)


@pytest.fixture(scope="module")
def undisturbed(config_file, home, env):
    """Returns the records of a run that nobody disturbs, and the seconds that it takes."""
    begin = time.monotonic()
    records = finish(config_file, make_workdir(home / "undisturbed"), env)
    assert len(records) == NUM_CELLS
    return records, time.monotonic() - begin


def make_workdir(path):
    """Makes a workdir whose costs are known, so that all of them choose alike."""
    path.mkdir()
    (path / "costs.json").write_text(json.dumps({"auto": {"1": COSTS.to_json()}}))
    return path


def flags(config_file, workdir):
    return f"--config={config_file}", f"--workdir={workdir}"


def start(config_file, workdir, env, **pipes):
    pipes = pipes or {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(
        command("jspec.experiment", *flags(config_file, workdir)), env=env, **pipes
    )


def finish(config_file, workdir, env, num_cells=NUM_CELLS):
    status, output, errors = run("jspec.experiment", *flags(config_file, workdir), env=env)
    assert status == 0, errors
    assert f"{num_cells} of {num_cells} cells are done" in output
    return without_times(done_cells(workdir))


def count_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_when(process, is_time):
    """Kills a process at the moment that a function tells; returns whether it still ran."""
    while process.poll() is None and not is_time():
        time.sleep(0.002)
    process.kill()
    assert process.wait() in (0, -9)
    return process.returncode == -9


def after_line(path, number):
    return lambda: count_lines(path) >= number


def after_time(seconds):
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def read_runs(workdir):
    """Returns which run has done each cell of a workdir; a torn last line does not count."""
    path = workdir / "results.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line)["run"] for line in lines]


def test_killed_at_twenty_random_moments(config_file, tmp_path, env, undisturbed):
    """Guards against a cell lost, done twice, or drawn otherwise after a kill.

    Runs are killed by turns at any moment and after a random cell; half of the kills are meant to
    fall among the cells. A run that is finished before it is killed is checked, not counted, and
    another workdir is begun.
    """
    rng = random.Random(1)
    expected, longest = undisturbed
    workdirs = (make_workdir(tmp_path / f"killed {number}") for number in itertools.count())
    workdir, num_killed, num_among = next(workdirs), 0, 0
    while num_killed < 20:
        results = workdir / "results.jsonl"
        wait = rng.uniform(0, longest)
        last = rng.randint(count_lines(results) + 1, NUM_CELLS - 1)
        is_time = after_time(wait) if num_killed % 2 else after_line(results, last)
        is_killed = kill_when(start(config_file, workdir, env), is_time)
        num_done = count_lines(results)
        num_killed += is_killed
        num_among += is_killed and 0 < num_done < NUM_CELLS
        if num_done >= NUM_CELLS - 1:
            assert finish(config_file, workdir, env) == expected
            workdir = next(workdirs)
    before = set(read_runs(workdir))
    assert finish(config_file, workdir, env) == expected
    assert set(read_runs(workdir)) - before  # there was work left, and the last run did it
    assert num_among >= 8


def test_killed_while_a_table_is_counted_and_among_estimates(folder, home, tmp_path, env):
    """Guards against another table, or other sums, after a kill in the midst of either."""
    prompts = write_lines(tmp_path / "prompts.jsonl", TINY_PROMPTS * 3)
    methods = {"bigram": {"drafter": "bigram"}, "lookup": {"drafter": "prompt_lookup"}}
    table = {"prompts_file": prompts, "num_tokens": 3000, "max_new_tokens": 10}
    plain = plain_config(folder, prompts, kind="estimate", methods=methods, table=table)
    path = write_config(tmp_path / "config.py", plain)
    whole, work = tmp_path / "whole", tmp_path / "work"
    expected = finish(path, whole, env, num_cells=48)
    answers, results = work / "table_answers.jsonl", work / "results.jsonl"
    assert kill_when(start(path, work, env), after_line(answers, 20))
    assert 20 <= count_lines(answers) < count_lines(whole / "table_answers.jsonl")
    assert not (work / "table.safetensors").exists()
    assert kill_when(start(path, work, env), after_line(results, 10))
    assert 10 <= count_lines(results) < 48
    assert finish(path, work, env, num_cells=48) == expected
    assert answers.read_bytes() == (whole / answers.name).read_bytes()
    tables = [safetensors.numpy.load_file(one / "table.safetensors") for one in (work, whole)]
    jax.tree.map(np.testing.assert_array_equal, *tables)
    assert len(set(read_runs(work))) == 2  # of three runs the first was killed before its cells


def test_a_killed_holders_cell_is_done_by_another_process(config_file, tmp_path, env, undisturbed):
    """Guards against a cell that stays taken: the other process would wait for it for ever."""
    expected, longest = undisturbed
    workdir = make_workdir(tmp_path / "shared")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    holder = start(config_file, workdir, env)
    while not after_line(workdir / "results.jsonl", 5)():
        time.sleep(0.002)
    holder.send_signal(signal.SIGSTOP)  # amid a cell, as a rule
    with start(config_file, workdir, env, **pipes) as second:
        time.sleep(longest)  # in which it does the other cells
        holder.kill()
        holder.wait()
        output, errors = second.communicate(timeout=60)
    assert second.returncode == 0, errors
    assert f"{NUM_CELLS} of {NUM_CELLS} cells are done" in output
    assert len(set(read_runs(workdir))) == 2
    assert without_times(done_cells(workdir)) == expected

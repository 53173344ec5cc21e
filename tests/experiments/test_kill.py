"""Runs that are killed, and processes that share a run, through the program."""

import json
import random
import subprocess
import time

import pytest

from jspec.costs import RoundCosts
from tests.experiments.tiny import (
    done_cells,
    plain_config,
    read_lines,
    without_times,
    write_config,
    write_prompts,
)
from tests.programs import command, environment, run

NUMBERS = (0, 1, 3, 7)
COSTS = RoundCosts((512,), NUMBERS, ("prompt_lookup",), (((0.01, 0.011, 0.012, 0.013),),))
WAYS = {
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
    prompts = write_prompts(home / "prompts.jsonl")
    plain = plain_config(folder, prompts, ways=WAYS, seeds=[0, 1], turns=0)
    return write_config(home / "config.py", plain)


@pytest.fixture(scope="module")
def undisturbed(config_file, home, env):
    """Returns the records of a run that nobody disturbs, and the seconds that it takes."""
    begin = time.monotonic()
    records = finish(config_file, make_workdir(home / "undisturbed"), env)
    assert len(records) == 48
    return records, time.monotonic() - begin


def make_workdir(path):
    """Makes a workdir whose costs are known, so that all of them choose alike."""
    path.mkdir()
    (path / "costs.json").write_text(json.dumps({"auto": {"1": COSTS.to_json()}}))
    return path


def flags(config_file, workdir):
    return f"--config={config_file}", f"--workdir={workdir}"


def finish(config_file, workdir, env):
    status, output, errors = run("jspec.experiment", *flags(config_file, workdir), env=env)
    assert status == 0, errors
    assert "48 of 48 cells are done" in output
    return without_times(done_cells(workdir))


def kill_at_random(config_file, tmp_path, env, undisturbed, num_kills, seed):
    """Kills a run at random moments, begins a new workdir where one is finished; checks all.

    Returns how many of the kills found results.
    """
    rng = random.Random(seed)
    expected, longest = undisturbed
    killed, number = 0, 0
    workdir = make_workdir(tmp_path / "killed 0")
    kills_that_found_work = 0
    while killed < num_kills:
        process = subprocess.Popen(
            command("jspec.experiment", *flags(config_file, workdir)),
            env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            process.wait(timeout=rng.uniform(0, longest))
        except subprocess.TimeoutExpired:
            process.kill()
            killed += 1
            results = workdir / "results.jsonl"
            kills_that_found_work += results.exists() and results.stat().st_size > 0
        assert process.wait() in (0, -9)
        if process.returncode == 0:
            assert without_times(done_cells(workdir)) == expected
            number += 1
            workdir = make_workdir(tmp_path / f"killed {number}")
    assert finish(config_file, workdir, env) == expected
    return kills_that_found_work


def test_killed_and_resumed_is_as_if_undisturbed(config_file, tmp_path, env, undisturbed):
    """Guards against a cell lost, done twice, or drawn otherwise after a kill."""
    kill_at_random(config_file, tmp_path, env, undisturbed, num_kills=3, seed=0)


@pytest.mark.slow
def test_killed_at_twenty_random_moments(config_file, tmp_path, env, undisturbed):
    """The same, twenty times; some of the kills must fall among the cells."""
    assert kill_at_random(config_file, tmp_path, env, undisturbed, num_kills=20, seed=1) >= 5


def test_two_processes_in_one_workdir(config_file, tmp_path, env, undisturbed):
    """Guards against cells done twice, and against two that wait for each other."""
    workdir = make_workdir(tmp_path / "shared")
    processes = [
        subprocess.Popen(
            command("jspec.experiment", *flags(config_file, workdir)),
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    for output, _ in outputs:
        assert "48 of 48 cells are done" in output
    assert without_times(done_cells(workdir)) == undisturbed[0]
    assert len(read_lines(workdir / "results.jsonl")) == 48

"""scripts/gpu_session.sh: what it refuses, what it would run on a GPU, and a rehearsal without."""

import collections
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tarfile

import jax
import pytest

from tests.programs import check_refusal

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_session.sh"
MISSING = ("beartype", "gguf", "ml_collections")  # where little but JAX is installed

# A Python that says it has a GPU, and notes what else it is asked for.
_STUB = """#!/usr/bin/env bash
case "$*" in
  *default_backend*) echo gpu ;;
  *find_spec*) exec {python} "$@" ;;
  *) printf '%q ' "$PYTHONPATH" "$@" >>{log}; echo >>{log}
     if [[ "$*" == *{slow}* ]]; then sleep 60; fi; [[ "$*" != *{failing}* ]] ;;
esac
"""
# Imports a program where some packages are missing, and parses its command lines.
_PARSE = """
import importlib, json, sys
from absl import flags
program, lines, missing = json.loads(sys.argv[1])
sys.modules |= dict.fromkeys(missing)
importlib.import_module(program)
for line in lines:
    flags.FLAGS.unparse_flags()
    assert flags.FLAGS(["program", *line]) == ["program"], line
"""


def call(folder, *more, **variables):
    """Returns the script's status and what it prints."""
    done = subprocess.run(
        ["bash", SCRIPT, folder, *more], env=os.environ | {"PYTHON": sys.executable} | variables,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.fixture
def call_on_gpu(tmp_path):
    """Returns a function that calls the session where a stub is Python: its output and commands."""
    log = tmp_path / "log"

    def run(failing="nothing", slow="nothing", **variables):
        stub = tmp_path / "python"
        paths = {"python": sys.executable, "log": log}
        stub.write_text(_STUB.format(failing=failing, slow=slow, **paths))
        stub.chmod(0o755)
        log.write_text("")
        status, printed = call(tmp_path / "out", PYTHON=str(stub), BACKEND="gpu", **variables)
        return status, printed, [shlex.split(line) for line in log.read_text().splitlines()]

    return run


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"STEPS": "distributions rooflne"}, "expected STEPS among"),
        ({"STEPS": " "}, "expected STEPS among"),
        ({"LIMIT": "ten"}, "expected LIMIT as a number of seconds, got ten"),
        ({"ANSWERS": "answers.jsonl"}, "expected TARGET with ANSWERS"),
        pytest.param(
            {"BACKEND": "gpu"},
            "expected a machine on which JAX's backend is gpu, got cpu",
            marks=pytest.mark.skipif(jax.default_backend() != "cpu", reason="there is one"),
        ),
        ({"JAX_PLATFORMS": "rocm"}, "expected a machine on which JAX's backend is there, got none"),
    ],
)
def test_what_it_refuses(variables, message, tmp_path):
    status, printed = call(tmp_path / "out", **variables)
    assert status == 2
    assert printed.startswith("error: ")
    assert message in printed
    assert not (tmp_path / "out").exists()


def test_a_flag_is_no_folder_for_results():
    """`--help` once ran everything, into a folder of that name."""
    status, printed = call("--help")
    assert (status, printed.splitlines()[0][:11]) == (0, "One command")
    status, printed = call("--quick")
    assert (status, printed) == (2, "error: expected a folder for the results, got --quick\n")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is one")
def test_a_program_without_its_gpu_says_so_in_a_line():
    """Guards against a page of JAX's own."""
    done = subprocess.run(
        [sys.executable, "-m", "jspec.benchmark", "--measure=quantization"], cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cuda"}, capture_output=True, check=False,
    )  # fmt: skip
    message = check_refusal(done.returncode, done.stdout.decode(), done.stderr.decode())
    assert "expected a device that JAX can use, got none with JAX_PLATFORMS=cuda" in message


def test_what_a_gpu_would_run_can_be_run_there(call_on_gpu):
    """Guards against minutes on a GPU that end with a flag or a module that is not there."""
    status, printed, commands = call_on_gpu()
    assert status == 0, printed
    lines = collections.defaultdict(list)
    for path, *arguments in commands:
        assert path.split(":")[0] == str(ROOT)  # jspec is not installed there
        _, program, *flags = arguments[arguments.index("-m") :]
        lines[program].append(flags)
    dtypes = [flag for line in lines["jspec.audit"] for flag in line if "--dtype" in flag]
    assert dtypes == ["--dtype=float32"] * 3 + ["--dtype=bfloat16"] * 3
    tests = [word for line in lines.pop("pytest") for word in line if word.startswith("tests/")]
    assert all((ROOT / test).exists() for test in tests)
    assert len(lines) == 2, sorted(lines)
    for program, own in lines.items():
        done = subprocess.run(
            [sys.executable, "-c", _PARSE, json.dumps([program, own, MISSING])],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def test_a_failure_costs_its_own_step_alone(call_on_gpu, tmp_path):
    """And what there is comes back in one file."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "record.jsonl").write_text("{}\n")
    status, printed, commands = call_on_gpu("measure=profile", STEPS="quantization profile")
    assert status == 1
    assert "failed, with status 1: " in printed
    assert "status 1" in printed.splitlines()[-1]
    assert [command[3] for command in commands if "--draw" not in command[3]] == [
        "--measure=profile",
        *["--measure=quantization"] * 2,
    ]
    with tarfile.open(tmp_path / "out.tgz") as file:
        assert "out/record.jsonl" in file.getnames()


def test_time_is_shared_by_weight_and_what_has_none_is_left_out(call_on_gpu):
    """Roofline has six parts where a profile has one; audits have none of two seconds."""
    _, printed, _ = call_on_gpu(STEPS="roofline profile", LIMIT="700")
    (roofline,) = [line for line in printed.splitlines() if line.startswith("== roofline")]
    assert 590 <= int(roofline.split()[-2]) <= 600
    (profile,) = [line for line in printed.splitlines() if line.startswith("== profile")]
    assert 680 <= int(profile.split()[-2]) <= 700  # what roofline did not need
    status, printed, commands = call_on_gpu(STEPS="audits", LIMIT="2")
    assert (status, commands) == (1, [])
    assert printed.count("left out, its time is over") == 6


def test_a_program_that_takes_too_long_is_ended(call_on_gpu):
    """And what comes after it still has its share."""
    models = ["random:llama3.2-1b", "b", "c"]
    status, printed, commands = call_on_gpu(
        slow=models[0], STEPS="quantization", LIMIT="15", QUANTIZED=" ".join(models)
    )
    assert status == 1
    assert printed.count("ended after ") == printed.count(models[0]) == 1
    assert [command[4] for command in commands] == [f"--target={model}" for model in models]


@pytest.mark.slow
def test_steps_leave_their_records_and_failures_their_status(tmp_path):
    """One step that works, and two that cannot."""
    status, printed = call(
        tmp_path, STEPS="profile drafters quantization", QUANTIZED="random:nothing", LIMIT="400",
        COMPARE_FLAGS="--repeats=0", PAIRS="random:smollm2-135m:1,random:smollm2-135m:1",
    )  # fmt: skip
    assert status == 1
    assert "status 1" in printed.splitlines()[-1]
    record = json.loads((tmp_path / "profile.jsonl").read_text())
    assert record["num_rounds"] > 0
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert printed.count("failed, with status 2: ") == 2

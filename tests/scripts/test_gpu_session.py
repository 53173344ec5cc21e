"""scripts/gpu_session.sh: what it refuses, what it would run on a GPU, and a rehearsal without."""

import collections
import importlib.util
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tarfile

import jax
import pytest

from jspec.weights.published import MODELS
from tests.programs import check_refusal

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_session.sh"
MISSING = ("beartype", "gguf", "ml_collections", "platformdirs")  # where little but JAX is there
PARTS = ("correctness", "profile", "shapes", "more", "pair", "peers", "roofline")

# A Python that says it has a GPU, and notes the programs that it is asked for.
_STUB = """#!/usr/bin/env bash
case "$*" in
  -c*default_backend*) exec {python} -c "import jax; jax.default_backend = lambda: 'gpu'
$2" "${{@:3}}" ;;
  -c*) exec {python} "$@" ;;
esac
printf '%q ' "$PYTHONPATH" "$@" >>{log}; echo >>{log}
[[ "$*" == *"-m pytest "* ]] && echo "=== 2 passed in 1.00s ===" || echo "a row of a table"
if [[ "$*" == *{slow}* ]]; then sleep 60; fi
[[ "$*" != *{failing}* ]] || {{ echo "what went wrong"; exit 3; }}
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
    flags.FLAGS(["program", *line])
"""


def call(*words, cwd=None, **variables):
    """Returns the script's status and what it prints."""
    done = subprocess.run(
        ["bash", SCRIPT, *words], cwd=cwd, env=os.environ | {"PYTHON": sys.executable} | variables,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1200, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def read_steps(folder):
    """Returns the records of steps by their names."""
    lines = (folder / "steps.jsonl").read_text().splitlines()
    return {record["step"]: record for record in map(json.loads, lines)}


@pytest.fixture
def call_on_gpu(tmp_path):
    """Returns a function that calls the session where a stub is Python: its output and commands."""
    log, cache = tmp_path / "log", tmp_path / "cache" / "models"
    cache.mkdir(parents=True)

    def run(*words, failing="nothing", slow="nothing", models=()):
        stub = tmp_path / "python"
        paths = {"python": sys.executable, "log": log}
        stub.write_text(_STUB.format(failing=failing, slow=slow, **paths))
        stub.chmod(0o755)
        log.write_text("")
        for name in models:
            (cache / MODELS[name].file).touch()
        variables = {"PYTHON": str(stub), "JSPEC_CACHE": str(cache.parent)}
        status, printed = call("--results=out/", *words, cwd=tmp_path, **variables)
        return status, printed, [shlex.split(line) for line in log.read_text().splitlines()]

    return run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["correctness", "rooflne"], "expected parts among correctness profile"),
        ([], "expected parts among"),
        (["--rehersal", "pair"], "--results=, --models=, --only= or parts; got --rehersal"),
        (["--results=", "pair"], "got --results="),
        (["--models=nowhere", "pair"], "expected a folder in --models, got nowhere"),
        pytest.param(
            ["shapes"],
            "expected a GPU that JAX can use, or --rehearse; JAX's backend is cpu",
            marks=pytest.mark.skipif(jax.default_backend() != "cpu", reason="there is one"),
        ),
    ],
)
def test_what_it_refuses(words, message, tmp_path):
    status, printed = call(f"--results={tmp_path / 'out'}", *words)
    assert status == 2
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1
    assert message in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PYTHON", "/nonexistent", "expected PYTHON to be a program, got /nonexistent"),
        ("JAX_PLATFORMS", "wrong", " said: expected JAX_PLATFORMS among "),
    ],
)
def test_why_jspec_cannot_run_is_said(name, value, message, tmp_path):
    """Guards against a cause that is none: all is installed."""
    words = "--rehearse", f"--results={tmp_path / 'out'}", "correctness"
    status, printed = call(*words, **{name: value})
    assert (status, printed[:7], printed.count("\n")) == (2, "error: ", 1)
    assert message in printed
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_its_own_stays_as_it_is(tmp_path):
    """Before any work; a rehearsal's folder is none of a session's."""
    stub, foreign, rehearsed = (tmp_path / name for name in ("python", "foreign", "rehearsed"))
    stub.write_text("#!/bin/sh\nprintf 'gpu\\n\\n{}\\n'\n")
    stub.chmod(0o755)
    for folder, file in ((foreign, "steps.jsonl"), (rehearsed, "rehearsal-environment.json")):
        folder.mkdir()
        (folder / file).write_text("theirs\n")
    (tmp_path / "packed.tgz").mkdir()
    refused = {
        foreign: "an empty folder, or one that holds environment.json,",
        rehearsed: "an empty folder, or one that holds environment.json,",
        ROOT: "an empty folder, or one that holds environment.json,",
        ROOT / "README.md": "a folder that can be made",
        "/proc/x": "a folder that can be made",
        tmp_path / "packed": f"a file or nothing at {tmp_path}/packed.tgz",
    }
    for folder, message in refused.items():
        status, printed = call(f"--results={folder}", "profile", PYTHON=str(stub))
        assert (status, printed.count("\n")) == (2, 1), printed
        assert printed.startswith(f"error: expected {message}")
    assert [path.name for path in foreign.iterdir()] == ["steps.jsonl"]
    assert (foreign / "steps.jsonl").read_text() == "theirs\n"


def test_help_runs_nothing():
    status, printed = call("--help")
    assert (status, printed.splitlines()[0][:10]) == (0, "Checks and")
    assert all(f"\n  {part} " in printed for part in PARTS)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is one")
def test_products_are_measured_on_a_gpu_alone(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "scripts.gpu_products", str(tmp_path / "out.jsonl")], cwd=ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "expected a GPU" in check_refusal(done.returncode, done.stdout, done.stderr)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is one")
@pytest.mark.parametrize(
    "words",
    [("benchmark", "--measure=quantization"), ("experiment", "--config=configs/smoke.py")],
    ids=" ".join,
)
def test_a_program_without_its_gpu_says_so_in_a_line(words, tmp_path):
    """Guards against a page of JAX's own."""
    program, *others = words
    workdir = [f"--workdir={tmp_path}"] * (program == "experiment")
    done = subprocess.run(
        [sys.executable, "-m", f"jspec.{program}", *others, *workdir], cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cuda"}, capture_output=True, check=False,
    )  # fmt: skip
    message = check_refusal(done.returncode, done.stdout.decode(), done.stderr.decode())
    assert "expected JAX_PLATFORMS among cpu; got cuda" in message


def test_a_part_takes_nine_minutes_and_all_take_thirty_four():
    """By their own limits, and by those of their steps."""
    text = SCRIPT.read_text()
    limits = {name: int(n) for name, n in re.findall(r"\[(\w+)\]=(\d+)", text)}
    assert tuple(limits) == PARTS
    assert max(limits.values()) < 540
    assert sum(limits.values()) <= 2040
    steps = r"^ +(?:JSPEC_\w+=0 )?(?:step|benchmark|beside|estimate) [\w\"$-]+ (\d+) "
    for part in PARTS:
        (body,) = re.findall(rf"^{part}\(\) {{\n(.*?)^}}", text, re.MULTILINE | re.DOTALL)
        branch = body.replace("    beside smollm2 170", "")  # in the place of the pair
        seconds = list(map(int, re.findall(steps, branch, re.MULTILINE)))
        assert seconds
        assert sum(seconds) <= limits[part], part


def test_estimates_meet_rounds_compiled_as_they_are():
    """Guards against rounds without fused kernels, or a graph, among those that roofline reads."""
    pattern = r"^ +(JSPEC_\w+=0 )?benchmark (\S*rounds-\S+)"
    steps = re.findall(pattern, SCRIPT.read_text(), re.MULTILINE)
    assert {bool(switch) for switch, _ in steps} == {True, False}
    assert all(name.startswith("rounds-") != bool(switch) for switch, name in steps)


def test_what_a_gpu_would_run_can_be_run_there(call_on_gpu, tmp_path):
    """Guards against minutes on a GPU that end with a flag or a module that is not there.

    Parts are asked for in another order than theirs, in a folder of an earlier call.
    """
    pair = "qwen2.5-coder-1.5b-instruct", "qwen2.5-coder-0.5b-instruct", "smollm2-135m-instruct"
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "environment.json").write_text("{}")
    for name in ("3b", "1b", "8b"):
        (tmp_path / "out" / f"rounds-{name}.jsonl").write_text('{"device": "NVIDIA H100 80GB"}\n')
    status, printed, commands = call_on_gpu(*reversed(PARTS), models=pair)
    assert status == 0, printed
    assert f"goes on in {tmp_path / 'out'}\n" in printed
    assert tuple(re.findall(r"^== (\w+)", printed, re.MULTILINE)) == PARTS
    assert "correctness, gpu-tests: done: 2 passed in 1.00s\n" in printed
    assert "shapes, rounds-3b: done\n" in printed
    lines = collections.defaultdict(list)
    for path, *arguments in commands:
        assert path.split(":")[0] == str(ROOT)  # jspec is not installed there
        _, program, *flags = arguments[arguments.index("-m") :]
        lines[program].append(flags)
    assert [line[0] for line in lines.pop("scripts.compare_times")] == [str(tmp_path / "out")]
    assert len(lines.pop("scripts.gpu_products")) == 1
    tests = [word for line in lines.pop("pytest") for word in line if word.startswith("tests/")]
    assert {"tests/test_gpu.py", "tests/kernels/gpu"} <= set(tests)
    assert all((ROOT / test).exists() for test in tests)
    assert set(lines) == {"jspec.audit", "jspec.benchmark", "scripts.compile_for"}
    assert all("--device=h100" in line for line in lines["scripts.compile_for"])
    assert any(f"--target={pair[0]}" in line for line in lines["jspec.benchmark"])
    parsing = [
        subprocess.Popen([sys.executable, "-c", _PARSE, json.dumps([*own, MISSING])], cwd=ROOT)
        for own in lines.items()
    ]
    assert [process.wait() for process in parsing] == [0] * len(lines)
    left = [
        one["step"] for one in read_steps(tmp_path / "out").values() if "left" in one["outcome"]
    ]
    needed = {"transformers": importlib.util.find_spec("torch"), "vllm": shutil.which("vllm")}
    assert left == [step for step, has_it in needed.items() if not has_it]


def test_a_failure_costs_its_own_step_alone(call_on_gpu, tmp_path):
    """Every step is on the disk, with what it last said; all of it comes back in one file."""
    status, printed, commands = call_on_gpu("profile", failing="--drafters=none")
    assert status == 1
    assert [command[4].split("=")[-1] for command in commands] == ["profile", "profile"]
    steps = read_steps(tmp_path / "out")
    assert [one["outcome"] for one in steps.values()] == ["failed", "done"]
    failed = steps["profile-plain"]
    assert failed["said"] == "what went wrong"
    assert (failed["part"], failed["limit"]) == ("profile", 55)
    assert "profile, profile-plain: failed: what went wrong\n" in printed
    assert len(call_on_gpu("profile", "--only=profile-pair")[2]) == 1
    status, printed, commands = call_on_gpu("profile", "--only=profile-pairs")
    assert (status, commands) == (2, [])
    assert "expected steps among profile-plain,profile-pair in --only, got" in printed
    with tarfile.open(tmp_path / "out.tgz") as file:
        assert {"out/steps.jsonl", "out/environment.json"} <= set(file.getnames())
    environment = json.loads((tmp_path / "out" / "environment.json").read_text())
    assert {"date", "versions", "device", "missing"} <= set(environment)


def test_a_step_that_takes_too_long_is_ended(call_on_gpu, tmp_path, monkeypatch):
    """And those after it still run."""
    text = SCRIPT.read_text()
    short = tmp_path / "scripts" / "gpu_session.sh"
    short.parent.mkdir()
    assert text.count("benchmark profile-plain 55") == 1
    short.write_text(text.replace("benchmark profile-plain 55", "benchmark profile-plain 2"))
    (tmp_path / "jspec").symlink_to(ROOT / "jspec")
    monkeypatch.setattr(sys.modules[__name__], "SCRIPT", short)
    status, _, commands = call_on_gpu("profile", slow="--drafters=none")
    assert status == 1
    steps = read_steps(tmp_path / "out")
    assert [one["outcome"] for one in steps.values()] == ["ended", "done"]
    assert 2 <= steps["profile-plain"]["seconds"] < 20
    assert len(commands) == 2


def test_without_its_files_the_pair_is_left_out_with_a_line(call_on_gpu, tmp_path):
    """And what its models would be measured with is not run."""
    status, printed, commands = call_on_gpu("pair")
    assert (status, commands) == (0, [])
    left = [one for one in read_steps(tmp_path / "out").values() if one["outcome"] == "left out"]
    assert [one["step"] for one in left] == ["pair", "smollm2"]
    assert "pair, pair: left out: no files of qwen2.5-coder-1.5b-instruct and" in printed


def test_a_model_is_put_together_from_its_parts(call_on_gpu, tmp_path, monkeypatch):
    """Guards against parts in a wrong order, and against an incomplete file."""
    model = MODELS["smollm2-135m-instruct"]
    folder, path = tmp_path / "parts", tmp_path / "cache" / "models" / model.file
    folder.mkdir()
    (folder / f"{model.file}.00").write_bytes(b"begin")
    status, _, commands = call_on_gpu("pair", f"--models={folder}")
    assert (status, commands, path.exists()) == (0, [], False)
    with (folder / f"{model.file}.01").open("wb") as file:
        file.truncate(model.num_bytes - 5)  # takes no room on the disk
    status, printed, (command,) = call_on_gpu("pair", f"--models={folder}")
    assert status == 0, printed
    assert "--target=smollm2-135m-instruct" in command
    assert path.stat().st_size == model.num_bytes
    with path.open("rb") as file:
        assert file.read(5) == b"begin"


@pytest.mark.slow
def test_a_rehearsal_leaves_a_record_of_every_step(tmp_path):
    """What is cheap of it: a profile, the rounds, and their estimates where there is a compiler."""
    status, printed = call(
        "--rehearse", f"--results={tmp_path / 'out'}", "profile", "shapes", "roofline"
    )
    steps = read_steps(tmp_path / "out")
    estimates = {name: one for name, one in steps.items() if name.startswith(("est", "roof"))}
    assert {one["outcome"] for name, one in steps.items() if name not in estimates} == {"done"}
    has_compiler = all(one["outcome"] == "done" for one in estimates.values())
    assert status == (0 if has_compiler else 1), printed
    assert has_compiler or 'pip install -e ".[compile-gpu]"' in estimates["estimate-1b"]["said"]
    if has_compiler:
        assert "a rehearsal's ratios mean nothing" in printed
        lines = json.loads((tmp_path / "out" / "roofline.jsonl").read_text())["lines"]
        assert len({line["name"] for line in lines}) == len(lines)
    for name in ("profile-pair", "rounds-3b", "synthetic-3b"):
        record = json.loads((tmp_path / "out" / f"{name}.jsonl").read_text())
        assert record["is_complete"]
    assert (tmp_path / "out.tgz").stat().st_size < 1 << 20

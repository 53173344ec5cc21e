"""Several processes of one run: `jspec.generate` with --coordinator, and what goes wrong."""

import json
import os
import re
import signal
import socket
import subprocess
import time

import pytest

from jspec.common import processes
from jspec.common.errors import InputError
from tests.lab.experiments.tiny import TEMPLATE
from tests.programs import call_generate, check_refusal, command, environment, run, write_lines
from tests.tiny_models import save_folder
from tests.training.on_meshes import begin, check_alike, kinds, losses, prepare

_PROMPT = "--prompt=the end of it"
_LOOKUP = "--drafter=prompt_lookup", "--num_draft_tokens=3"
_USUAL = ("--dtype=float32", "--temperature=0", "--max_new_tokens=24", "--nostats", _PROMPT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder of a tiny target."""
    folder = tmp_path_factory.mktemp("model") / "m"
    return save_folder(folder, num_layers=1, num_heads=8, max_seq_len=4096)


@pytest.fixture
def start(compile_cache, tmp_path):
    """Returns a function that starts the processes of a run, with flags for all and for each."""
    begun = []

    def start(
        number, *flags, own_flags=((), ()), devices=1, cluster=None, script=None,
        program="jspec.generate",
    ):  # fmt: skip
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        env = environment(compile_cache, tmp_path / "home")
        flag = f"--xla_force_host_platform_device_count={devices}"
        env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{flag} {os.environ.get('XLA_FLAGS', '')}"}
        for index in range(number):
            of_run = [f"--coordinator=localhost:{port}", f"--num_processes={number}"]
            of_run = ["--coordinator=auto"] if cluster else [*of_run, f"--process_id={index}"]
            line = command(program, *flags, *own_flags[index % len(own_flags)], *of_run)
            env |= cluster(index, number) if cluster else {}
            if script is not None:
                line = command(script, f"localhost:{port}", str(number), str(index), *flags)
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": env}
            begun.append(subprocess.Popen(line, **pipes))
        return begun

    yield start
    for process in begun:
        with process:  # closes its pipes
            process.kill()


def ends(begun, timeout=100):
    """Returns status, output and errors of each process."""
    outcomes = []
    for process in begun:
        output, errors = process.communicate(timeout=timeout)
        outcomes.append((process.returncode, output.decode(), errors.decode()))
    return outcomes


def test_two_processes_answer_as_one(start, folder, monkeypatch, capsys):
    """The first of them speaks, and says what a process alone says."""
    flags = f"--target={folder}", *_LOOKUP, *_USUAL
    alone = call_generate(monkeypatch, capsys, *flags)
    first, second = ends(start(2, *flags, "--mesh=model:2"))
    assert first[:2] == (0, alone[1])
    assert second[:2] == (0, "")


def of_slurm(process_id, number):
    """Returns the variables that SLURM sets for the processes of a step."""
    values = {"SLURM_JOB_ID": os.getpid(), "SLURM_NTASKS": number, "SLURM_PROCID": process_id,
              "SLURM_LOCALID": process_id, "SLURM_STEP_NUM_NODES": 1, "SLURM_JOB_NUM_NODES": 1,
              "SLURM_STEP_NODELIST": "localhost"}  # fmt: skip
    return {name: str(value) for name, value in values.items()}


@pytest.mark.slow
def test_processes_that_slurm_started(start, folder, monkeypatch, capsys):
    """They find each other; where there is no cluster, one line says so."""
    flags = f"--target={folder}", "--drafter=prompt_lookup", *_USUAL
    alone = call_generate(monkeypatch, capsys, *flags)
    first, second = ends(start(2, *flags, "--mesh=model:2", cluster=of_slurm))
    assert first[:2] == (0, alone[1])
    assert second[:2] == (0, "")
    (*_, lost) = ends(start(1, *flags, "--mesh=model:2", cluster=lambda process_id, number: {}))
    assert "this process: expected a cluster that JAX knows" in check_refusal(*lost)


def test_processes_of_different_flags(start, folder):
    """Guards against a run whose processes wait for each other's other programs."""
    flags = f"--target={folder}", *_USUAL, "--mesh=model:2"
    for status, output, errors in ends(start(2, *flags, own_flags=((), ("--seed=1",)))):
        assert (status, output) == (2, "")
        assert "got seed None in process 0 and 1 in process 1" in errors


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--coordinator=localhost:1"], "or --mesh and --coordinator=auto; got --coordinator"),
        (["--coordinator=auto"], "or --mesh and --coordinator=auto; got --coordinator"),
        (
            ["--coordinator=localhost:1", "--num_processes=2", "--process_id=2", "--mesh=model:2"],
            "expected process_id from 0 to 1, got 2",
        ),
        (
            ["--coordinator=localhost", "--num_processes=2", "--process_id=1", "--mesh=model:2"],
            "expected coordinator as HOST:PORT, got 'localhost'",
        ),
        (["--mesh=model:2", "--process_id=0"], "--coordinator=auto; got --mesh, --process_id"),
        (["--mesh=model:3"], "divides the 1 device that is there, got model:3, of 3"),
    ],
)
def test_bad_flags(flags, said, monkeypatch, capsys):
    """A line for each, before any model is loaded."""
    assert said in check_refusal(*call_generate(monkeypatch, capsys, *flags, _PROMPT))


def test_a_coordinator_that_does_not_answer(monkeypatch):
    """Guards against the C++ of JAX, which ends the process with its own page."""
    monkeypatch.setattr(processes, "PATIENCE", 0.3)
    with pytest.raises(InputError, match=r"process 0, to answer at localhost:1 within 0\.3 s"):
        processes._await("localhost", 1)


def test_a_coordinators_port_that_is_in_use(compile_cache, tmp_path, folder):
    with socket.create_server(("", 0)) as taken:
        address = f"localhost:{taken.getsockname()[1]}"
        flags = "--num_processes=1", "--process_id=0", "--mesh=model:1", f"--coordinator={address}"
        done = subprocess.run(
            command("jspec.generate", f"--target={folder}", *_USUAL, *flags),
            env=environment(compile_cache, tmp_path / "home") | {"JAX_PLATFORMS": "cpu"},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    expected = f"a port that is free on this machine in --coordinator={address}"
    assert expected in check_refusal(done.returncode, done.stdout, done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_process_ends_the_run(start, folder, lost):
    """Within the heartbeat's limit, with a line that names it."""
    long = "--max_new_tokens=3900", "--min_new_tokens=3900"
    begun = start(2, f"--target={folder}", *_USUAL, *long, "--mesh=model:2")
    assert begun[0].stdout.read(1), "it speaks"
    begun[lost].send_signal(signal.SIGKILL)
    begin = time.monotonic()
    status, _, errors = ends([begun[1 - lost]], timeout=60)[0]
    assert status == 2
    assert time.monotonic() - begin < processes.HEARTBEAT + 10
    said = f"error: process {1 - lost} of 2: process {lost} of the run was lost"
    assert errors.splitlines()[-1] == said  # the first process has told more before


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_process_ends_training(start, compile_cache, tmp_path, lost):
    """With the same line; what both have written is whole, and one process goes on from it."""
    prepare(tmp_path)
    work = tmp_path / "work"
    fields = {
        "target": tmp_path / "m", "texts": (str(tmp_path / "texts.jsonl"),), "num_held_out": 16,
        "seq_len": 48, "batch_size": 8, "vocab_size": 60, "feature_layers": (1, 2),
        "dtype": "float32", "recipe.num_steps": 300, "recipe.evaluate_every": 8,
        "recipe.log_every": 1,
    }  # fmt: skip
    flags = "--config=configs/train_eagle.py", f"--workdir={work}"
    flags += tuple(f"--config.{name}={value}" for name, value in fields.items())
    begun = start(2, *flags, "--mesh=data:2", program="jspec.train")
    metrics, end = work / "metrics.jsonl", time.monotonic() + 100
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 30):
        assert time.monotonic() < end
        assert begun[0].poll() is None, begun[0].communicate()[1].decode()
        time.sleep(0.1)
    begun[lost].send_signal(signal.SIGKILL)
    status, _, errors = ends([begun[1 - lost]], timeout=60)[0]
    said = f"error: process {1 - lost} of 2: process {lost} of the run was lost"
    assert (status, errors.splitlines()[-1]) == (2, said), errors
    assert not (work / "head").exists()
    env = environment(compile_cache, tmp_path / "home")
    status, _, errors = run("jspec.train", *flags, env=env, timeout=300)
    assert status == 0, errors
    assert re.search(r"going on after step [1-9]\d* of 300", errors)
    assert (work / "head").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("mesh", ["model", "data"])
def test_many_processes(start, folder, number, mesh, monkeypatch, capsys, tmp_path):
    """Also of several devices each; rows of prompts on their processes."""
    lines = [{"prompt": f"prompt number {i}"} for i in range(6)]
    prompts = write_lines(tmp_path / "prompts.jsonl", lines)
    flags = [f"--target={folder}", "--drafter=prompt_lookup", *_USUAL[:-1]]
    flags += [f"--prompts_file={prompts}", "--batch_size=4", "--acceptance=coupled"]
    flags.append("--temperature=1")
    alone = call_generate(monkeypatch, capsys, *flags)
    shape = f"model:{2 * number}" if mesh == "model" else f"data:{number},model:2"
    outcomes = ends(start(number, *flags, f"--mesh={shape}", devices=2))
    assert outcomes[0][:2] == (0, alone[1])


@pytest.mark.slow
def test_every_drafter_in_processes(start):
    """Greedy and coupled texts of 1, 2 and 4 processes, each set of processes started once."""
    script = "tests.drafters_in_processes"
    runs = (1, ()), (2, ("model:2",)), (4, ("model:4", "data:2,model:2"))
    (alone, of_two, of_four) = (
        json.loads(ends(start(number, *meshes, script=script)[-number:], timeout=900)[0][1])
        for number, meshes in runs
    )
    assert of_two == {"model:2": alone}
    assert of_four == {"model:4": alone, "data:2,model:2": alone}
    assert all(greedy != coupled for (greedy, _), (coupled, _) in alone.values())


@pytest.mark.slow
def test_processes_choose_numbers_of_drafts_alike(start, folder, monkeypatch, capsys):
    """By the costs of the first, measured by both; then those that it remembers.

    Else each would run other rounds, and wait for ever.
    """
    flags = f"--target={folder}", "--drafter=prompt_lookup", *_USUAL
    alone = call_generate(monkeypatch, capsys, *flags)
    flags += "--num_draft_tokens=auto", "--mesh=model:2"
    said = []
    for _ in range(2):
        first, second = ends(start(2, *flags)[-2:])
        assert first[:2] == (0, alone[1])
        assert second[:2] == (0, "")
        said.append("measuring what rounds" in first[2])
    assert said == [True, False]


@pytest.mark.slow
def test_two_processes_measure_as_one(start, tmp_path):
    """Benchmark and experiment: the first process writes what one device writes, but for times."""
    target = save_folder(tmp_path / "m", template=TEMPLATE, num_heads=8)
    lines = [{"prompt": f"text {i}"} for i in range(4)]
    prompts = write_lines(tmp_path / "prompts.jsonl", lines)
    path, work = tmp_path / "record.json", tmp_path / "work"
    usual = f"--target={target}", f"--prompts_file={prompts}", f"--output_json={path}"
    usual += "--mesh=model:2", "--max_new_tokens=12", "--drafters=none,prompt_lookup"
    configs = "--config=configs/smoke.py", f"--workdir={work}", "--config.mesh=data:2"
    configs += f"--config.target={target}", f"--config.prompts_file={prompts}"
    configs += "--config.max_seq_len=200", "--config.batch_sizes=(2,)", "--config.dtype=float32"
    for program, flags in (
        ("jspec.benchmark", (*usual, "--dtype=float32", "--repeats=2")),
        ("jspec.experiment", configs),
        ("jspec.experiment", configs),  # nothing is left to do
    ):
        first, second = ends(start(2, *flags, program=program)[-2:], timeout=300)
        assert (first[0], second[:2]) == (0, (0, "")), first[2]
        if program == "jspec.benchmark":
            record = json.loads(path.read_text())
            assert record["flags"]["num_processes"] == 2
            assert record["is_complete"]
            assert [one["same_answers"] for one in record["methods"].values()] == [4, 4]
    assert "12 of 12 cells are done" in first[1]


@pytest.mark.slow
def test_two_processes_train_as_one(start, tmp_path):
    """Every kind of drafter, on one of two meshes; also runs that go on elsewhere."""
    prepare(tmp_path)
    configs = kinds(tmp_path)
    alone = {kind: losses(config, tmp_path / kind) for kind, config in configs.items()}
    begin(configs["eagle"], tmp_path / "moved")
    meshes = "data:2,model:2", "model:4"
    begun = start(2, str(tmp_path), *meshes, devices=2, script="tests.training.on_meshes")
    (status, output, errors), (second_status, *_) = ends(begun, timeout=900)
    assert (status, second_status) == (0, 0), errors
    losses_by_mesh = json.loads(output.splitlines()[-1])
    losses_by_mesh["back"] = {"eagle": losses(configs["eagle"], tmp_path / "back")}
    for mesh, kinds_of_mesh in losses_by_mesh.items():
        for kind, run_losses in kinds_of_mesh.items():
            check_alike(f"{kind} on {mesh} of two processes", run_losses, alone[kind])
            if mesh in meshes:
                names = [
                    sorted(path.name for path in folder.rglob("*.safetensors"))
                    for folder in (tmp_path / mesh / kind, tmp_path / kind)
                ]
                assert names[0] == names[1] != []

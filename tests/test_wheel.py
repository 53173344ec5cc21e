"""jspec as a stranger gets it: a wheel, installed elsewhere, used in an empty folder."""

import importlib.metadata
import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
import venv

import pytest

from tests.programs import environment
from tests.tiny_models import save_folder

ROOT = pathlib.Path(__file__).parents[1]
# What a wheel is built from; a copy, as building leaves files that the next build would take.
SOURCES = ("jspec", "configs", "setup.py", "pyproject.toml", "README.md", "LICENSE")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="pip builds the wheel"),
]


def pip(*arguments):
    """Runs pip, which must succeed."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def build_options():
    """Returns pip's options: without a network, where the build backend is here and new enough."""
    try:
        major = int(importlib.metadata.version("setuptools").split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return []
    return ["--no-build-isolation"] if major >= 77 else []


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Returns the Python of a new environment with the wheel, which finds what jspec needs here."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pip("wheel", str(source), "--no-deps", *build_options(), "--wheel-dir", str(folder))
    (wheel,) = folder.glob("jspec-*.whl")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv/bin/python"
    pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    # After the wheel's own folder; the .pth files there, of an editable jspec, are not read.
    needed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "needed.pth").write_text("\n".join(needed))
    return python


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_folder(tmp_path_factory.mktemp("model") / "tiny", num_layers=1, max_seq_len=2048)


@pytest.fixture(scope="module")
def env(compile_cache, tmp_path_factory):
    """Returns variables of a user who has nothing of jspec's, and no network."""
    home = tmp_path_factory.mktemp("home")
    env = environment(compile_cache, home)
    return {name: value for name, value in env.items() if name != "PYTHONPATH"}


@pytest.fixture
def jspec(python, env, tmp_path):
    """Returns a function that runs the console command in an empty folder."""

    def run(*arguments, status=0):
        done = subprocess.run(
            [python.with_name("jspec"), *map(str, arguments)],
            cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500, check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout if status == 0 else done.stderr

    return run


def test_the_wheel_is_whole(python, env, tmp_path):
    """Guards against a checkout that is used unseen, and against files that are not packed."""
    code = """
import importlib.resources, json, sys
files = importlib.resources.files("jspec")
shipped = [path.name for path in (files / "configs").iterdir() if path.is_file()]
print(json.dumps([str(files), (files / "py.typed").is_file(), shipped]))
"""
    done = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    where, is_typed, shipped = json.loads(done.stdout)
    assert pathlib.Path(where).is_relative_to(python.parents[1])
    assert is_typed
    assert sorted(shipped) == sorted(path.name for path in (ROOT / "configs").glob("*.*"))


def test_every_program_starts(jspec):
    assert re.fullmatch(r"jspec \d+\.\d+\.\d+\n", jspec("--version"))
    for program in ("generate", "serve", "train", "audit", "benchmark", "experiment", "report"):
        assert "lists all flags" in jspec(program, "--help")


def test_an_answer_and_the_default_prompts(jspec, model):
    """Guards against files that a benchmark finds in a checkout alone."""
    flags = f"--target={model}", "--dtype=float32", "--max_new_tokens=4"
    assert jspec("generate", *flags, "--drafter=prompt_lookup", "--prompt=abcabc").strip()
    flags += "--num_prompts=2", "--repeats=1", "--notransformers", "--drafters=none,prompt_lookup:2"
    assert "prompt_lookup" in jspec("benchmark", *flags)
    flags = f"--target={model}", "--dtype=float32", "--max_new_tokens=2", "--drafter=none"
    assert jspec("generate", *flags, "--prompts_file=configs/prompts.jsonl").strip()


def test_configs_by_name(jspec, model, tmp_path):
    """By jspec's own names, and as in a checkout; what is in the current folder comes first."""
    smoke = f"--config.target={model}", "--config.num_prompts=1", "--config.max_new_tokens=2"
    assert "cells are done" in jspec("experiment", "--config=smoke", "--workdir=a", *smoke)
    assert "cells are done" in jspec(
        "experiment", "--config=configs/paper_table1.py", "--workdir=b"
    )
    jspec("report", "b")
    assert (tmp_path / "b/report.md").is_file()
    (tmp_path / "smoke").write_text("raise ValueError('mine')")
    error = jspec("experiment", "--config=smoke", "--workdir=c", status=2)
    assert "smoke: ValueError: mine" in error
    error = jspec("experiment", "--config=smok", "--workdir=c", status=2)
    assert error.count("\n") == 1
    assert "no config file 'smok'" in error
    error = jspec("train", "--config=train_eagle", f"--config.target={model}", "--workdir=d",
                  '--config.texts=("absent.jsonl",)', status=2)  # fmt: skip
    assert "absent.jsonl" in error


def test_the_server_has_its_page(python, env, model, tmp_path):
    command = [python.with_name("jspec"), "serve", "--port=0", f"--target={model}",
               "--dtype=float32", "--max_slots=1", "--drafter=none"]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    watchdog = threading.Timer(500, process.kill)
    watchdog.start()
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "http://" in line:
                break
        assert lines, "it ended"
        port = int(lines[-1].rpartition(":")[2])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as page:
            assert b"<html" in page.read()
    finally:
        watchdog.cancel()
        process.terminate()
        process.wait()
        process.stderr.close()


def test_offline_models_are_refused_in_one_line(jspec):
    """Guards against a network that is used although it was forbidden, and against a traceback."""
    for name in ("smollm2-135m-instruct", "organisation/absent"):
        error = jspec("generate", "--offline", f"--target={name}", "--prompt=a", status=2)
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert name in error

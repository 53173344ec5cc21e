"""scripts/make_answers.py: what was answered before is neither done again nor mixed with others."""

import importlib.util
import json
import pathlib
import sys

import pytest
from absl.testing import flagsaver

from jspec import cli
from tests.programs import check_refusal
from tests.tiny_models import save_folder

_SCRIPT = pathlib.Path(__file__).parents[1] / "scripts" / "make_answers.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_answers", _SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def call(script, monkeypatch, capsys, tmp_path, tmp_path_factory):
    """Returns a function that runs the script on five prompts: status, output, errors."""
    folder = save_folder(tmp_path_factory.mktemp("models") / "target")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(5)))

    def run(*arguments):
        output = tmp_path / "answers.jsonl"
        fixed = [f"--target={folder}", f"--prompts_file={prompts}", f"--output_json={output}",
                 "--max_new_tokens=6", "--chunk=2", "--batch_size=2"]  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["make_answers", *fixed, *arguments])
        capsys.readouterr()
        status = 0
        with flagsaver.flagsaver():
            try:
                cli.run_main(script.main)
            except SystemExit as error:
                status = error.code or 0
        return (status, *capsys.readouterr())

    return run


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_torn_run_goes_on(call, tmp_path):
    """The answers are those of an undisturbed run, each prompt once."""
    path = tmp_path / "answers.jsonl"
    assert call("--temperature=1")[0] == 0
    whole = sorted(read(path), key=lambda one: one["index"])
    assert [one["index"] for one in whole] == list(range(5))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:20])
    assert call("--temperature=1")[0] == 0
    assert sorted(read(path), key=lambda one: one["index"]) == whole
    before = path.read_bytes()
    assert call("--temperature=1")[0] == 0
    assert path.read_bytes() == before


@pytest.mark.parametrize("flag", ["--temperature=0.5", "--seed=3", "--max_new_tokens=7"])
def test_other_answers_are_not_mixed(call, tmp_path, flag):
    """One line that names what differs, and the file stays."""
    assert call("--num_prompts=2")[0] == 0
    before = (tmp_path / "answers.jsonl").read_bytes()
    message = check_refusal(*call(flag))
    assert flag[2:].partition("=")[0] in message
    assert (tmp_path / "answers.jsonl").read_bytes() == before

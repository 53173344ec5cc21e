"""scripts/make_answers.py: what was made before is neither made again nor mixed with others."""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.programs import check_refusal, environment, read_lines, run_many, write_lines
from tests.tiny_models import save_folder

_SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "make_answers.py"
_TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}.{% endfor %}"
_FOREIGN = '{"prompt": "a"}\n{"prompt": oops'
_TEAR = """
import pathlib, shutil
lines = pathlib.Path("whole").read_text().splitlines(keepends=True)
pathlib.Path("torn").write_text("".join(lines[:2]) + lines[2][:20])
"""


def test_answers_are_made_once_and_not_mixed(compile_cache, tmp_path, monkeypatch):
    """A torn run goes on; what is no answer of the same run is refused, and left alone."""
    monkeypatch.chdir(tmp_path)
    env = environment(compile_cache, tmp_path / "home")
    env["PYTHONPATH"] = f"{_SCRIPT.parents[1]}:{env.get('PYTHONPATH', '')}"
    write_lines(tmp_path / "prompts", [{"prompt": f"number {i}"} for i in range(5)])
    contents = {"foreign": _FOREIGN, "empty": "\n", "one": '{"prompt": "a"}'}
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    target = f"--target={save_folder(tmp_path / 'target', num_layers=1)}"
    usual = [target, "--prompts_file=prompts", "--max_new_tokens=6", "--chunk=2", "--batch_size=2",
             "--max_prompt_tokens=40", "--dtype=float32", "--temperature=1"]  # fmt: skip
    whole, torn, none = "--output_json=whole", "--output_json=torn", "--output_json=none"
    refused = {
        (*usual, whole, "--temperature=0.5"): "prompt 0: made with temperature 1.0, not 0.5",
        (*usual, "--output_json=foreign"): "expected an answer of this script",
        (*usual, "--prompts_file=one", "--output_json=one"): "than is read",
        (*usual, none, "--num_prompts=-1"): "expected num_prompts from 1",
        (*usual, none, "--prompts_file=empty"): "expected a prompt in",
        (target, none, "--what=prompts"): "expected a model with a chat template",
        (): "expected --prompts_file and --output_json",
        ("--what=prompts",): "expected --output_json",
        ("--what=table",): "expected --input and --output",
    }
    made = [[*usual, whole], _TEAR, [*usual, torn], [*usual, torn]]  # the last has nothing to do
    outcomes = run_many("scripts.make_answers", [*made, *map(list, refused)], env=env)
    assert [status for status, *_ in outcomes[:3]] == [0] * 3, outcomes[:3]
    answers = [
        sorted(read_lines(tmp_path / name), key=lambda record: record["index"])
        for name in ("whole", "torn")
    ]
    assert [record["index"] for record in answers[0]] == list(range(5))
    assert answers[0] == answers[1]
    for outcome, message in zip(outcomes[3:], refused.values(), strict=True):
        assert message in check_refusal(*outcome)
    assert {name: (tmp_path / name).read_text() for name in contents} == contents
    assert not (tmp_path / "none").exists()


@pytest.fixture
def call_for_prompts(compile_cache, tmp_path):
    """Returns a function that runs the script: status, output, errors.

    The model's distribution is made so flat that texts soon end.
    """
    fixed = ["--max_new_tokens=60", "--temperature=5", "--top_p=1", "--batch_size=4", "--chunk=4",
             "--dtype=float32"]  # fmt: skip

    def run(target, name, *arguments):
        done = subprocess.run(
            [sys.executable, str(_SCRIPT), "--what=prompts", f"--target={target}", *fixed,
             *arguments, f"--output_json={tmp_path / name}"],
            capture_output=True, text=True, env=environment(compile_cache, tmp_path / "home"),
            timeout=120,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.slow
def test_a_run_that_goes_on_makes_the_same_prompts(call_for_prompts, tmp_path):
    """Those of an undisturbed run, each once and none of them empty."""
    target = save_folder(tmp_path / "target", template=_TEMPLATE)
    assert call_for_prompts(target, "whole", "--num_prompts=24")[0] == 0
    whole = (tmp_path / "whole").read_bytes()
    prompts = [json.loads(line) for line in whole.splitlines()]
    texts = [one["prompt"] for one in prompts]
    assert 1 < len(set(texts)) == len(texts) < 24
    assert all(text.strip() for text in texts)
    lines = whole.splitlines(keepends=True)
    (tmp_path / "torn").write_bytes(lines[0] + lines[1][:7])
    assert call_for_prompts(target, "torn", "--num_prompts=24")[0] == 0
    assert (tmp_path / "torn").read_bytes() == whole
    message = check_refusal(*call_for_prompts(target, "torn", "--num_prompts=24", "--top_p=0.5"))
    assert "torn:1: made with top_p 1.0, not 0.5" in message
    assert (tmp_path / "torn").read_bytes() == whole

"""scripts/make_answers.py: what was made before is neither made again nor mixed with others."""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.programs import check_refusal, environment, run_many
from tests.tiny_models import save_folder

_SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "make_answers.py"
_TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}.{% endfor %}"


@pytest.fixture
def call(compile_cache, tmp_path):
    """Returns a function that runs the script on five prompts: status, output, errors."""
    folder = save_folder(tmp_path / "target", num_layers=1)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(5)))
    fixed = [f"--target={folder}", f"--prompts_file={prompts}", "--max_new_tokens=6",
             f"--output_json={tmp_path / 'answers.jsonl'}", "--chunk=2", "--batch_size=2",
             "--max_prompt_tokens=40", "--dtype=float32"]  # fmt: skip

    def run(*arguments, times=1):
        lines, env = [[*fixed, *arguments]] * times, environment(compile_cache, tmp_path / "home")
        return run_many("scripts.make_answers", lines, env=env)[-1]

    return run


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_torn_run_goes_on(call, tmp_path):
    """The answers are those of an undisturbed run, each prompt once."""
    path = tmp_path / "answers.jsonl"
    assert call("--temperature=1")[0] == 0
    whole = sorted(read(path), key=lambda record: record["index"])
    assert [record["index"] for record in whole] == list(range(5))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:20])
    assert call("--temperature=1", times=2)[0] == 0  # the second has nothing to do
    assert sorted(read(path), key=lambda record: record["index"]) == whole


def test_a_file_of_another_is_left_alone(call, tmp_path):
    """Guards against a torn last line cut off a file that is not this script's."""
    path = tmp_path / "answers.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": oops')
    assert "expected an answer of this script" in check_refusal(*call())
    assert path.read_text() == '{"prompt": "a"}\n{"prompt": oops'


def test_other_answers_are_not_mixed(call, tmp_path):
    """One line that names what differs, and the file stays."""
    assert call("--num_prompts=2")[0] == 0
    before = (tmp_path / "answers.jsonl").read_bytes()
    message = check_refusal(*call("--temperature=0.5"))
    assert "prompt 0: made with temperature 0.0, not 0.5" in message
    assert (tmp_path / "answers.jsonl").read_bytes() == before


def test_prompts_are_no_answers(call, tmp_path):
    """Guards against prompts that are cut off as a torn line, or among the answers to them."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}')
    assert "than is read" in check_refusal(*call(f"--output_json={path}"))
    assert path.read_text() == '{"prompt": "a"}'


def test_nothing_to_answer_is_refused(call, tmp_path):
    """Guards against the last prompt left out, and success without an answer."""
    assert "expected num_prompts from 1" in check_refusal(*call("--num_prompts=-1"))
    (tmp_path / "prompts.jsonl").write_text("\n")
    assert "expected a prompt in" in check_refusal(*call())
    assert not (tmp_path / "answers.jsonl").exists()


def test_all_missing_flags_are_named(compile_cache, tmp_path):
    """Guards against a second refusal after the first one is heeded."""
    cases = {
        "": "expected --prompts_file and --output_json",
        "--what=prompts": "expected --output_json",
        "--what=table": "expected --input and --output",
    }
    env = environment(compile_cache, tmp_path / "home")
    outcomes = run_many("scripts.make_answers", [flag.split() for flag in cases], env=env)
    for outcome, message in zip(outcomes, cases.values(), strict=True):
        assert message in check_refusal(*outcome)


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


def test_a_model_without_a_template_is_refused(call_for_prompts, tmp_path):
    """Nothing says where its users begin."""
    target = save_folder(tmp_path / "target", num_layers=1)
    message = check_refusal(*call_for_prompts(target, "prompts"))
    assert "expected a model with a chat template" in message
    assert not (tmp_path / "prompts").exists()

"""scripts/make_prompts.py: a model goes on as the user; a run that was stopped goes on."""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.programs import check_refusal, environment
from tests.tiny_models import save_folder

_SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "make_prompts.py"
_TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}.{% endfor %}"


@pytest.fixture
def call(compile_cache, tmp_path):
    """Returns a function that runs the script: status, output, errors.

    The model's distribution is made so flat that texts soon end.
    """
    fixed = ["--max_new_tokens=60", "--temperature=5", "--top_p=1", "--batch_size=4", "--chunk=4",
             "--dtype=float32"]  # fmt: skip

    def run(target, name, *arguments):
        done = subprocess.run(
            [sys.executable, str(_SCRIPT), f"--target={target}", *fixed, *arguments,
             f"--output_json={tmp_path / name}"],
            capture_output=True, text=True, env=environment(compile_cache, tmp_path / "home"),
            timeout=120,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    return run


def test_a_run_that_goes_on_makes_the_same_prompts(call, tmp_path):
    """Those of an undisturbed run, each once and none of them empty."""
    target = save_folder(tmp_path / "target", template=_TEMPLATE)
    assert call(target, "whole", "--num_prompts=24")[0] == 0
    whole = (tmp_path / "whole").read_bytes()
    prompts = [json.loads(line) for line in whole.splitlines()]
    texts = [one["prompt"] for one in prompts]
    assert 1 < len(set(texts)) == len(texts) < 24
    assert all(text.strip() for text in texts)
    lines = whole.splitlines(keepends=True)
    (tmp_path / "torn").write_bytes(lines[0] + lines[1][:7])
    assert call(target, "torn", "--num_prompts=24")[0] == 0
    assert (tmp_path / "torn").read_bytes() == whole
    message = check_refusal(*call(target, "torn", "--num_prompts=24", "--top_p=0.5"))
    assert "torn:1: made with top_p 1.0, not 0.5" in message
    assert (tmp_path / "torn").read_bytes() == whole


def test_a_model_without_a_template_is_refused(call, tmp_path):
    """Nothing says where its users begin."""
    target = save_folder(tmp_path / "target")
    message = check_refusal(*call(target, "prompts"))
    assert "expected a model with a chat template" in message
    assert not (tmp_path / "prompts").exists()

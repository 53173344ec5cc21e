"""scripts/gpu_train: its plan, what it keeps, what it refuses; a rehearsal trains a head."""

import json
import pathlib
import re

import pytest

from jspec.common.errors import InputError
from jspec.training.chain_loss import SCORE
from scripts.gpu_train import steps as gpu_steps
from scripts.gpu_train.steps import Plan, keep, steps_of
from tests import tiny_models
from tests.programs import environment, refuse_all, run
from tests.tiny_heads import SAVE_HEAD
from tests.training.folders import read_metrics

ROOT = pathlib.Path(__file__).parents[2]
MODULE = "scripts.gpu_train"
MOST_BYTES = 16 << 20  # of a file that comes back


def make_plan(folder, drafter="eagle", fields=None):
    return Plan("tiny", ("hello",), drafter, fields or {}, 4, 16, folder, folder, True)


def test_the_plan_fits_into_one_call(tmp_path):
    """And the text of --help has the steps and their seconds."""
    steps = steps_of(make_plan(tmp_path))
    text = (ROOT / "scripts" / "gpu_train" / "__main__.py").read_text()  # its flags are global
    most = int(re.search(r"^CALL_SECONDS = (\d+)$", text, re.MULTILINE)[1])
    assert sum(step.seconds for step in steps) <= most < 600
    rows = re.findall(r"^\| (\w+) \| (\d+) \|", text, re.MULTILINE)
    assert rows == [(step.name, str(step.seconds)) for step in steps]


@pytest.mark.parametrize("drafter", ["eagle", "dflash", "dspark"])
def test_fields_of_the_flags_come_last(tmp_path, drafter):
    """Those of the recipe, too; a field that is not one is named."""
    fields = {"seq_len": 48, "recipe": {"learning_rate": 0.25}}
    config = make_plan(tmp_path, drafter, fields).config(7)
    assert (config.drafter, config.seq_len, config.batch_size) == (drafter, 48, 2)
    assert (config.recipe.num_steps, config.recipe.learning_rate) == (7, 0.25)
    with pytest.raises(InputError, match="no_such"):
        make_plan(tmp_path, drafter, {"no_such": 1}).config(7)


def test_what_is_kept_fits_and_joins(tmp_path, monkeypatch):
    """The head in int8 and, in parts, the file that was trained; an earlier head is replaced."""
    monkeypatch.setattr(gpu_steps, "_PIECE", 5000)
    workdir, results = tmp_path / "run", tmp_path / "results"
    results.mkdir()
    SAVE_HEAD["eagle"](workdir / "head", tiny_models.CONFIG)
    (workdir / "metrics.jsonl").write_text("{}\n")
    for _ in range(2):
        keep(workdir, "head", results)
    parts = sorted(results.glob("weights.*"))
    assert len(parts) > 1
    whole = (workdir / "head" / "model.safetensors").read_bytes()
    assert b"".join(part.read_bytes() for part in parts) == whole
    assert 0 < (results / "head" / "model.safetensors").stat().st_size < len(whole)
    assert gpu_steps._PIECE < MOST_BYTES


@pytest.mark.slow
def test_a_rehearsal_trains_a_head(tmp_path, compile_cache):
    """All steps, in a process as users start it; run again, nothing is left to do."""
    env = environment(compile_cache, tmp_path / "home") | {"JAX_PLATFORMS": "cpu"}
    flags = "--rehearse", f"--results={tmp_path / 'results'}"
    status, out, err = run(MODULE, *flags, env=env, timeout=1200)
    assert status == 0, out + err
    journal = (tmp_path / "results" / "session.jsonl").read_text()
    lines = [json.loads(line) for line in journal.splitlines()]
    ends = [(line["step"], line["outcome"]) for line in lines if line["kind"] == "step"]
    assert ends == [(name, "done") for name in ("answers", "speed", "training", "check")]
    assert any(SCORE in line.get("held_out", {}) for line in read_metrics(tmp_path / "results"))
    files = [path for path in (tmp_path / "results").rglob("*") if path.is_file()]
    assert len(files) <= 8
    assert max(path.stat().st_size for path in files) <= MOST_BYTES
    status, out, err = run(MODULE, *flags, env=env, timeout=600)
    assert status == 0, out + err
    assert out.count("is in the journal already") == 4


def test_bad_flags_are_refused_in_one_line(tmp_path, compile_cache):
    """Flags are checked before the GPU, which is not there; nothing is written."""
    env = environment(compile_cache, tmp_path / "home") | {"JAX_PLATFORMS": "cpu"}
    results, prompts = tmp_path / "results", "--prompts_file=configs/prompts.jsonl"
    (tmp_path / "file").touch()
    expected = {
        (): "--prompts_file or --rehearse",
        (prompts, "--fields=[1]"): "a JSON object in --fields",
        (prompts, '--fields={"no_such": 1}'): "no_such",
        (prompts, "--models=/no/such/folder"): "a folder in --models",
        (prompts, f"--results={tmp_path / 'file'}"): "a folder in --results",
        (prompts,): "a GPU that JAX can use, or --rehearse",
    }
    refuse_all(f"{MODULE}.__main__", expected, env=env, fixed=[f"--results={results}"])
    assert not results.exists()

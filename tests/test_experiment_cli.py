"""python -m jspec.experiment."""

import functools
import json
import os
import pathlib
import time

import pytest

from tests.lab.experiments.tiny import (
    TEMPLATE,
    TINY_PROMPTS,
    done_cells,
    plain_config,
    write_config,
)
from tests.programs import call, check_refusal, read_lines, run, write_lines
from tests.tiny_models import save_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    return save_folder(path, template=TEMPLATE, num_layers=1)


@pytest.fixture
def config_file(folder, tmp_path):
    prompts = write_lines(tmp_path / "prompts.jsonl", TINY_PROMPTS)
    return write_config(tmp_path / "config.py", plain_config(folder, prompts))


@pytest.fixture
def experiment(monkeypatch, capsys):
    """Returns a function that runs the program in this process."""
    return functools.partial(call, "jspec.experiment", monkeypatch, capsys)


def test_a_run_and_what_it_says(experiment, config_file, tmp_path):
    """Guards the contract of the program: status, standard output, progress, overrides.

    It runs in a process of its own in test_write_your_own.py.
    """
    work = tmp_path / "work"
    status, output, errors = experiment(
        f"--config={config_file}", f"--workdir={work}", "--config.num_prompts=2",
        "--config.max_new_tokens=6", "--config.seeds=(0,5)",
        '--config.methods["lookup"].num_draft_tokens=2',
    )  # fmt: skip
    assert status == 0, errors
    assert output == f"{work}: 16 of 16 cells are done\n"
    assert errors.splitlines()[-2:] == [
        "16 of 16 cells",
        f"the report: python -m jspec.report {work}",
    ]
    assert "Traceback" not in errors
    config = json.loads((work / "config.json").read_text())
    assert (config["num_prompts"], config["max_new_tokens"], config["seeds"]) == (2, 6, [0, 5])
    assert config["methods"]["lookup"]["num_draft_tokens"] == 2
    assert list(config["methods"]) == ["plain", "lookup"]
    answers = [one for record in done_cells(work).values() for one in record["answers"]]
    assert all(len(one["token_ids"]) <= 6 for one in answers)
    (run_record,) = read_lines(work / "runs.jsonl")
    assert run_record["argv"][:4] == ["python", "-m", "jspec.experiment", f"--config={config_file}"]
    assert run_record["environment"]["versions"]["jax"]
    assert set(run_record["git"] or {"commit": 0, "is_dirty": 0}) == {"commit", "is_dirty"}


def test_failed_cells_are_the_status(experiment, tmp_path):
    """Guards against a script that goes on as if all had been measured."""
    machine = {"bandwidth": 1e11, "flop_rate": 1e13}
    pairs = {"good": machine, "bad": machine | {"draft": "smollm2-135m"}}
    path = write_config(tmp_path / "c.py", {"kind": "predict", "predict": pairs})
    status, output, _ = experiment(f"--config={path}", f"--workdir={tmp_path / 'work'}")
    assert status == 1
    assert output.endswith("1 of 2 cells are done, 1 failed\n")


# What a config may say is in tests/lab/experiments/test_spec.py.
BAD_FLAGS = {
    "--config.max_new_token=3": "no field 'max_new_token'; did you mean 'max_new_tokens'?",
    "--config.max_new_tokens=many": "--config.max_new_tokens=many: expected a whole number",
    "--config.table.temperature=hot": "expected a number, got 'hot'",
    "--config.methods=3": "expected methods to be a group of fields, got '3'",
    "--config.methods.lookup.num_draft_token=3": "no field 'methods.lookup.num_draft_token'",
    "--config.methods.lookup.num_draft_tokens=many": "or 'auto', got 'many'",
    "--config.title.x=3": "no field 'title.x'; 'title' is no group",
    "--config.target=nowhere": "target: no model 'nowhere'",
    "--workdir=": "expected --workdir=DIR, the folder that the run writes to, got none",
    "--config=": "no config file ''",
    "--config=bad.py": "bad.py: ValueError: no way",
    "--mesh=model:2": "expected --config.mesh in the place of --mesh",
    "--coordinator=localhost:1": "expected --config.mesh, --coordinator, --num_processes and",
    "positional": "expected flags only, got 'positional'",
}


@pytest.mark.parametrize("flag", BAD_FLAGS)
def test_bad_flags_are_one_line(experiment, config_file, tmp_path, monkeypatch, flag):
    """Guards against tracebacks, also of a file of the user."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text("def get_config(): raise ValueError('no\\nway')")
    outcome = experiment(f"--config={config_file}", "--workdir=work", flag)
    assert BAD_FLAGS[flag] in check_refusal(*outcome)
    assert not (tmp_path / "work").exists()


def test_without_a_config_nothing_is_run(experiment):
    assert "expected --config" in check_refusal(*experiment())


def test_a_config_works_from_another_folder(experiment, folder, tmp_path, monkeypatch):
    """Guards against configs that work in the clone alone; what is here comes first."""
    for name in ("clone", "here"):
        (tmp_path / name / "configs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    methods = {"plain": {"drafter": "none"}}
    plain = plain_config(folder, "configs/p.jsonl", settings={"T=0": {}}, methods=methods)
    flags = f"--config={write_config('../clone/configs/c.py', plain)}", "--workdir=work"
    places = f"No such file, neither in {tmp_path / 'here'} nor in {tmp_path / 'clone'}"
    assert f"prompts file configs/p.jsonl: {places}" in check_refusal(*experiment(*flags))
    write_lines(tmp_path / "clone/configs/p.jsonl", [{"prompt": "ab"}])
    assert experiment(*flags)[:2] == (0, "work: 1 of 1 cell is done\n")
    write_lines(tmp_path / "here/configs/p.jsonl", [{"prompt": "ab"}, {"prompt": "cd"}])
    assert "have changed since" in check_refusal(*experiment(*flags))


@pytest.mark.slow
def test_the_smoke_config_is_fast_and_its_report_opens(compile_cache, tmp_path):
    """Guards against a first look that takes longer than it promises. The model is the user's.

    The first run compiles what the second, whose time counts, finds in the cache.
    """
    env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(compile_cache)}
    for work in (tmp_path / "first", tmp_path / "second"):
        begin = time.monotonic()
        flags = "--config=configs/smoke.py", f"--workdir={work}"
        status, output, errors = run("jspec.experiment", *flags, env=env, timeout=600)
        seconds = time.monotonic() - begin
        assert status == 0, errors
        assert output == f"{work}: 24 of 24 cells are done\n"
    assert seconds < 60
    status, output, errors = run("jspec.report", str(work), env=env, timeout=600)
    assert status == 0, errors
    files = [pathlib.Path(line) for line in output.splitlines()]
    figures = [file for file in files if file.suffix == ".png"]
    assert all(file.stat().st_size for file in files)
    text = (work / "report.md").read_text(encoding="utf-8")
    assert text.count("](figures/") == len(figures)
    assert all(word in text for word in ("prompt_lookup:3", "ngram:3", "Glossary", "T=1"))

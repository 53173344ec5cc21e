"""python -m jspec.experiment."""

import json
import os
import pathlib
import sys
import time

import pytest
from absl.testing import flagsaver

from tests.lab.experiments.tiny import (
    TEMPLATE,
    done_cells,
    plain_config,
    read_lines,
    write_config,
    write_prompts,
)
from tests.programs import check_refusal, environment, run
from tests.tiny_models import save_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    return save_folder(path, template=TEMPLATE, num_layers=1)


@pytest.fixture
def config_file(folder, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    return write_config(tmp_path / "config.py", plain_config(folder, prompts))


@pytest.fixture
def experiment(monkeypatch, capsys, tmp_path):
    """Returns a function that runs the program in this process."""
    from jspec import experiment
    from jspec.cli import program as cli

    def run_it(*flags):
        monkeypatch.setattr(sys, "argv", ["experiment", *flags])
        capsys.readouterr()
        status = 0
        with flagsaver.flagsaver():
            try:
                cli.run_main(experiment.main)
            except SystemExit as error:
                status = error.code or 0
        return (status, *capsys.readouterr())

    return run_it


def test_a_process_of_its_own(config_file, compile_cache, tmp_path):
    """Guards the contract of the program: status, standard output, progress, overrides."""
    work = tmp_path / "work"
    status, output, errors = run(
        "jspec.experiment", f"--config={config_file}", f"--workdir={work}",
        "--config.num_prompts=2", "--config.max_new_tokens=6", "--config.seeds=(0,5)",
        '--config.methods["lookup"].num_draft_tokens=2',
        env=environment(compile_cache, tmp_path / "home"),
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


def test_failed_cells_are_the_status(experiment, folder, tmp_path):
    """Guards against a script that goes on as if all had been measured."""
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": "ab"}, {"prompt": "x" * 300}])
    path = write_config(tmp_path / "c.py", plain_config(folder, prompts, settings={"T=0": {}}))
    status, output, _ = experiment(f"--config={path}", f"--workdir={tmp_path / 'work'}")
    assert status == 1
    assert output.endswith("2 of 4 cells are done, 2 failed\n")


BAD_FLAGS = {
    "--config.max_new_token=3": "no field 'max_new_token'; did you mean 'max_new_tokens'?",
    "--config.max_new_tokens=many": "--config.max_new_tokens=many: expected a whole number",
    "--config.table.temperature=hot": "expected a number, got 'hot'",
    "--config.methods=3": "expected methods to be a group of fields, got '3'",
    "--config.table=5": "expected table to be a group of fields, got '5'",
    "--config.methods.lookup.num_draft_token=3": "no field 'methods.lookup.num_draft_token'",
    "--config.methods.lookup.num_draft_tokens=many": "or 'auto', got 'many'",
    "--config.title.x=3": "no field 'title.x'; 'title' is no group",
    "--config.kind=magic": "expected kind among",
    "--config.num_prompts=1.5": "--config.num_prompts=1.5: expected a whole number",
    "--config.seeds=(a b)": "seeds",
    "--config.prompts_file=question.jsonl": "cannot read the prompts file question.jsonl: No such",
    "--config.target=nowhere": "target: no model 'nowhere'",
    '--config.methods["lookup"].magic=3': "magic",
    "--workdir=": "expected --workdir=DIR, the folder that the run writes to, got none",
    '--config.methods["lookup"].draft=nowhere': "in Python draft) expects a drafter among model",
    "--config.chat=3": "expected chat among auto, yes, no; got '3'",
    "--mesh=model:2": "expected --config.mesh in the place of --mesh",
    "--coordinator=localhost:1": "expected --config.mesh, --coordinator, --num_processes and",
    "--magic=3": "Unknown command line flag 'magic'",
    "positional": "expected flags only, got 'positional'",
}


@pytest.mark.parametrize("flag", BAD_FLAGS)
def test_bad_flags_are_one_line(experiment, config_file, tmp_path, flag):
    """Guards against tracebacks."""
    outcome = experiment(f"--config={config_file}", f"--workdir={tmp_path / 'work'}", flag)
    assert BAD_FLAGS[flag] in check_refusal(*outcome)


BAD_FILES = {
    None: "no config file",
    "def get_config(:": "SyntaxError",
    "def get_config(): raise RuntimeError('no\\nway')": "RuntimeError: no way",
    "def get_config(): raise ValueError('no\\nway')": "ValueError: no way",
    "def get_config(): raise OSError('no\\nway')": "OSError: no way",
    "def get_config(): return None": "expected get_config() to return a ConfigDict, got NoneType",
    "from jspec.lab.experiments.config import defaults\n"
    "def get_config():\n  c = defaults(); c.batch_size = 3; return c": "no field 'batch_size'",
}


@pytest.mark.parametrize("content", BAD_FILES)
def test_bad_config_files_are_one_line(experiment, tmp_path, content):
    """Guards against tracebacks of a file of the user."""
    path = tmp_path / "bad.py"
    if content is not None:
        path.write_text(content)
    outcome = experiment(f"--config={path}", f"--workdir={tmp_path / 'work'}")
    assert BAD_FILES[content] in check_refusal(*outcome)
    assert not (tmp_path / "work").exists()


def test_nothing_asked_for(experiment):
    """Guards against a traceback where a flag is forgotten."""
    assert "expected --config" in check_refusal(*experiment())
    assert "expected --workdir" in check_refusal(*experiment("--config=configs/smoke.py"))


def test_an_empty_prompt_set(experiment, config_file, tmp_path):
    """Guards against a run of nothing that ends well."""
    (tmp_path / "prompts.jsonl").write_text("\n")
    outcome = experiment(f"--config={config_file}", f"--workdir={tmp_path / 'work'}")
    assert "expected at least one prompt in" in check_refusal(*outcome)


def test_another_config_is_refused_and_a_torn_line_redone(experiment, config_file, tmp_path):
    """Guards the two promises about what lies in a workdir, through the program."""
    work = tmp_path / "work"
    flags = f"--config={config_file}", f"--workdir={work}", "--config.num_prompts=1"
    assert experiment(*flags)[0] == 0
    outcome = experiment(*flags, "--config.max_new_tokens=7")
    message = check_refusal(*outcome)
    assert "belongs to another config: max_new_tokens is 10 there and 7 here" in message
    results = work / "results.jsonl"
    before = done_cells(work)
    results.write_bytes(results.read_bytes()[:-20])
    status, output, errors = experiment(*flags)
    assert status == 0
    assert "its last line is torn, and cut off" in errors
    assert output == f"{work}: 4 of 4 cells are done\n"
    assert list(done_cells(work)) == list(before)


def test_a_workdir_that_is_a_file(experiment, config_file, tmp_path):
    """Guards against a traceback."""
    path = tmp_path / "file"
    path.touch()
    outcome = experiment(f"--config={config_file}", f"--workdir={path}")
    assert "cannot make the workdir" in check_refusal(*outcome)


def test_a_config_works_from_another_folder(experiment, folder, tmp_path, monkeypatch):
    """Guards against configs that work in the clone alone."""
    (tmp_path / "clone" / "configs").mkdir(parents=True)
    write_prompts(tmp_path / "clone" / "configs" / "p.jsonl", [{"prompt": "ab"}])
    plain = plain_config(folder, "configs/p.jsonl", settings={"T=0": {}})
    path = write_config(tmp_path / "clone" / "configs" / "c.py", plain)
    monkeypatch.chdir(tmp_path)
    for given in (path, "clone/configs/c.py"):
        status, output, _ = experiment(f"--config={given}", f"--workdir=from {len(given)}")
        assert (status, output) == (0, f"from {len(given)}: 2 of 2 cells are done\n")
    outcome = experiment(f"--config={path}", "--workdir=w", "--config.prompts_file=q.jsonl")
    places = f"No such file, neither in {tmp_path} nor in {tmp_path / 'clone'}"
    assert f"cannot read the prompts file q.jsonl: {places}" in check_refusal(*outcome)


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

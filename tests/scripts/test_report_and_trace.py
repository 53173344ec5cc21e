"""jspec.report and scripts/trace.py, as a user runs them."""

import json

import pytest

from tests.lab.reports.workdirs import cells, trace, write
from tests.programs import check_refusal, environment, run, run_many
from tests.tiny_models import save_folder


@pytest.fixture
def env(tmp_path, compile_cache):
    """Returns variables for the programs."""
    return environment(compile_cache, tmp_path)


def test_a_folder_becomes_a_report(tmp_path, env):
    """The folder is an argument, or a flag."""
    folder = write(tmp_path / "run", cells(), traces=[trace()], tail='{"torn')
    lines = [[str(folder)], [f"--workdir={folder}"]]
    for status, output, errors in run_many("jspec.report", lines, env=env, max_arguments=1):
        assert (status, errors) == (0, "")
        written = output.splitlines()
        assert written[:2] == [str(folder / "report.md"), str(folder / "tables.csv")]
        assert str(folder / "figures" / "by-number.png") in written
    assert "torn or broken" in (folder / "report.md").read_text()


def test_what_is_worth_committing_is_published(tmp_path, env):
    """The folder of the run is left as it is."""
    folder, out = write(tmp_path / "run", cells()), tmp_path / "out"
    before = sorted(folder.iterdir())
    status, output, errors = run("jspec.report", str(folder), f"--publish={out}", env=env)
    assert (status, errors) == (0, "")
    assert sorted(folder.iterdir()) == before
    written = {str(path) for path in out.rglob("*") if path.is_file()}
    assert set(output.splitlines()) == written
    assert str(out / "results.jsonl.gz") in written


def test_bad_input_is_one_line(tmp_path, env):
    """Guards against a traceback, or a report in the wrong place."""
    folder = str(write(tmp_path / "run", cells()))
    cases = (
        ([], "expected one folder"),
        ([folder, f"--workdir={folder}"], "expected one folder"),
        ([folder, "more"], "expected at most 1 besides flags, got 'more'"),
        ([str(tmp_path / "none")], "no such folder"),
        ([str(tmp_path)], f"expected the --workdir of python -m jspec.experiment, got {tmp_path}"),
        ([folder, "--publish="], "expected a folder: --publish=FOLDER"),
        ([folder, f"--publish={folder}"], "got that of a run"),
    )
    lines = [arguments for arguments, _ in cases]
    outcomes = run_many("jspec.report", lines, env=env, max_arguments=1)
    for outcome, (_, message) in zip(outcomes, cases, strict=True):
        assert message in check_refusal(*outcome)


def test_other_programs_still_take_flags_only(env):
    """Guards against an argument that is silently ignored."""
    refused = check_refusal(*run("jspec.generate", "prompt", env=env))
    assert "expected flags only, got 'prompt'" in refused


def test_a_generation_is_shown_round_by_round(tmp_path, env):
    """The trace is printed, written to a folder that is made, and found by the report."""
    folder, target = write(tmp_path / "run", cells()), save_folder(tmp_path / "t", num_layers=1)
    new = tmp_path / "new" / "run"
    flags = (f"--target={target}", "--prompt=abcabc", "--dtype=float32",
             "--max_new_tokens=8", "--num_draft_tokens=3", f"--workdir={new}")  # fmt: skip
    cases = (
        ("--name=other", "begins with trace"),
        ("--drafter=none", "expected a drafter that drafts"),
        (f"--svg={tmp_path / 'no' / 'x.svg'} --target=nowhere", "there is no folder"),
        ("--draft_layers=1", "draft_layers with a drafter that reads it"),
        (
            "--draft_temperature=2",
            "draft_temperature with a drafter that draws from a distribution",
        ),
    )
    lines = [flags, *([*flags, *flag.split()] for flag, _ in cases)]
    (status, output, errors), *refused = run_many("scripts.trace", lines, env=env)
    assert status == 0, errors
    assert "calls of the target" in output
    assert "\033" not in output
    (new / "trace.json").rename(folder / "trace.json")
    assert json.loads((folder / "trace.json").read_text())["drafter"] == "prompt_lookup"
    for outcome, (_, message) in zip(refused, cases, strict=True):
        assert message in check_refusal(*outcome)
    status, _, errors = run("jspec.report", str(folder), env=env)
    assert status == 0, errors
    assert "One generation, round by round" in (folder / "report.md").read_text()

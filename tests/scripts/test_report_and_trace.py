"""jspec.report and scripts/trace.py, as a user runs them."""

import pytest

from jspec.lab.analysis.trace import check_trace
from jspec.lab.reports.workdir import read_workdir
from tests.lab.reports.workdirs import cells, trace, write
from tests.programs import check_refusal, environment, run_many
from tests.tiny_models import save_folder


@pytest.fixture
def env(tmp_path, compile_cache):
    """Returns variables for the programs."""
    return environment(compile_cache, tmp_path)


def test_a_folder_becomes_a_report(tmp_path, env):
    """The folder is an argument, or a flag; what is published leaves it as it is."""
    folder = write(tmp_path / "run", cells(repeats=1), traces=[trace()], tail='{"torn')
    plain, out = write(tmp_path / "plain", cells(repeats=1)), tmp_path / "out"
    before = sorted(plain.iterdir())
    refused = {
        (): "expected one folder",
        (folder, f"--workdir={folder}"): "expected one folder",
        (folder, "more"): "expected at most 1 besides flags, got 'more'",
        (tmp_path / "none",): "no such folder",
        (tmp_path,): f"expected the --workdir of python -m jspec.experiment, got {tmp_path}",
        (folder, "--publish="): "expected a folder: --publish=FOLDER",
        (folder, f"--publish={folder}"): "got that of a run",
    }
    lines = [[folder], [f"--workdir={plain}", f"--publish={out}"], *refused]
    made, published, *outcomes = run_many(
        "jspec.report", [list(map(str, line)) for line in lines], env=env, max_arguments=1
    )
    for outcome, message in zip(outcomes, refused.values(), strict=True):
        assert message in check_refusal(*outcome)
    assert (made[0], made[2], published[0], published[2]) == (0, "", 0, "")
    written = made[1].splitlines()
    assert written[:2] == [str(folder / "report.md"), str(folder / "tables.csv")]
    assert str(folder / "figures" / "by-number.png") in written
    assert "torn or broken" in (folder / "report.md").read_text()
    assert sorted(plain.iterdir()) == before
    files = {str(path) for path in out.rglob("*") if path.is_file()}
    assert set(published[1].splitlines()) == files
    assert str(out / "results.jsonl.gz") in files


def test_a_generation_is_shown_round_by_round(tmp_path, env):
    """The trace is printed, written to a folder that is made, and found by the report."""
    folder, target = write(tmp_path / "run", []), save_folder(tmp_path / "t", num_layers=1)
    new = tmp_path / "new" / "run"
    flags = (f"--target={target}", "--prompt=abcabc", "--dtype=float32",
             "--max_new_tokens=8", "--num_draft_tokens=3", f"--workdir={new}")  # fmt: skip
    cases = {
        "--name=other": "begins with trace",
        "--drafter=none": "expected a drafter that drafts",
        f"--svg={tmp_path / 'no' / 'x.svg'} --target=nowhere": "there is no folder",
        "--draft_layers=1": "draft_layers with a drafter that reads it",
        "--draft_temperature=2": "draft_temperature with a drafter that draws from a distribution",
    }
    lines = [flags, *([*flags, *flag.split()] for flag in cases)]
    (status, output, errors), *refused = run_many("scripts.trace", lines, env=env)
    assert status == 0, errors
    assert "calls of the target" in output
    assert "\033" not in output
    (new / "trace.json").rename(folder / "trace.json")
    (written,) = read_workdir(folder).traces
    assert check_trace(written)["drafter"] == "prompt_lookup"
    for outcome, message in zip(refused, cases.values(), strict=True):
        assert message in check_refusal(*outcome)

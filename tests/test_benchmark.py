"""python -m jspec.benchmark. In processes of its own: its flags have names of jspec.generate's."""

import json
import subprocess
import sys

import pytest

from tests.programs import check_refusal, command, environment, run
from tests.tiny_models import save_folder

# The program's main with each command line in turn, in one process; JSON on standard output.
_MANY = """
import contextlib, io, json, sys
from absl.testing import flagsaver
from jspec import benchmark
from jspec.common import cli
outcomes = []
benchmark.has_transformers = lambda: False
for line in json.loads(sys.argv[1]):
    sys.argv, out, err, status = ["benchmark", *line], io.StringIO(), io.StringIO(), 0
    with flagsaver.flagsaver(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.run_main(benchmark.main)
        except SystemExit as error:
            status = error.code
    outcomes.append([status, out.getvalue(), err.getvalue()])
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_folder(tmp_path_factory.mktemp("model") / "tiny")


def test_a_report_on_a_tiny_model(folder, compile_cache, tmp_path):
    """Guards against a report that cannot be made again: raw timings, flags and versions."""
    prompts, path = tmp_path / "p.jsonl", tmp_path / "report.json"
    prompts.write_text("".join(f'{{"prompt": "text {i}"}}\n' for i in range(5)))
    status, output, errors = run(
        "jspec.benchmark", f"--target={folder}", "--notransformers", f"--prompts_file={prompts}",
        "--num_prompts=2", "--repeats=3", "--max_new_tokens=6", "--dtype=float32",
        f"--output_json={path}", env=environment(compile_cache, tmp_path / "home"),
    )  # fmt: skip
    assert status == 0, errors
    assert errors.index("warming up jspec prompt_lookup") < errors.index("repeat 1 of 3")
    report = json.loads(path.read_text())
    assert list(report["methods"]) == ["jspec plain", "jspec prompt_lookup"]
    assert report["peak_bytes"] > 1e7
    plain, lookup = report["methods"].values()
    assert plain["same_answers"] == lookup["same_answers"] == 2  # float32, greedy: invariant 2
    ratio, inverse = lookup["ratio_to"]["jspec plain"], plain["ratio_to"]["jspec prompt_lookup"]
    assert ratio["low"] <= ratio["median"] <= ratio["high"]
    assert ratio["median"] * inverse["median"] == pytest.approx(1)
    timing = report["timings"]["jspec plain"]
    assert [len(row) for row in timing["seconds"]] == [2] * 3
    assert timing["tokens"] == [[6, 6]] * 3
    assert all(seconds > 0 for row in timing["seconds"] for seconds in row)
    rows = [line.split() for line in output.splitlines()]
    assert rows[1][:2] == ["jspec", "plain"]
    assert rows[2][:2] == ["jspec", "prompt_lookup"]
    assert "2/2" in rows[1]
    assert "peak memory of jspec: " in output


# The program, in a process in which some of transformers' ways fail.
_FAILING = """
import sys
from jspec import benchmark
from jspec.common import cli
from jspec.evaluation.benchmarking import peers
from jspec.evaluation.benchmarking import baselines
def method(name):
    def generate(prompt, count):
        if name == "transformers prompt_lookup:2":
            raise RuntimeError("no\\n compiler")
        return peers.Generated([1] * count, count - 1, count - 1)
    return generate
def make(target, draft, ways, compiled_length):
    if "all" in sys.argv:
        raise MemoryError("too much")
    return {name: method(name) for name in ways}
benchmark.has_transformers = lambda: True
baselines.transformers_generators = make
cli.run_main(lambda _: benchmark.main(), max_arguments=1)
"""


@pytest.mark.parametrize("failing", ["one", "all"])
def test_a_method_that_fails_is_left_out(folder, compile_cache, tmp_path, failing):
    """Guards against a record lost because torch's compiler lacks something; it says what."""
    path = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-c", _FAILING, f"--target={folder}", "--num_prompts=1",
         "--repeats=1", "--max_new_tokens=4", "--dtype=float32", "--drafters=none,prompt_lookup",
         f"--output_json={path}", failing],
        env=environment(compile_cache, tmp_path / "home"), capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    record = json.loads(path.read_text())
    one = {"transformers prompt_lookup:2": "RuntimeError: no compiler"}
    every = dict.fromkeys(["transformers plain", *one], "MemoryError: too much")
    assert record["left_out"] == (one if failing == "one" else every)
    measured = [] if failing == "all" else ["transformers plain"]
    assert list(record["methods"]) == ["jspec plain", "jspec prompt_lookup", *measured]
    assert record["is_complete"]
    for name, reason in record["left_out"].items():
        assert f"note: {name} is left out: {reason}\n" in done.stderr.decode()


# The program, where nothing is measured: it says how much would be.
_SCOPES = """
import sys
from jspec import benchmark
from jspec.common import cli
from jspec.evaluation.analysis.machine import Machine
from jspec.evaluation.benchmarking.roofline import (FULL, QUICK, Line)
def measure(*args):
    print("quick" if args[-1] is QUICK else "full" if args[-1] is FULL else args[-1])
    yield Machine(1.0, 1.0), [Line("a", 1.0)]
benchmark.measure_roofline = measure
cli.run_main(benchmark.main)
"""


@pytest.mark.parametrize(("flags", "scope"), [([], "full"), (["--quick"], "quick")])
def test_a_quick_roofline_is_asked_for(folder, compile_cache, tmp_path, flags, scope):
    command_line = [sys.executable, "-c", _SCOPES, f"--target={folder}", "--roofline", *flags]
    env = environment(compile_cache, tmp_path / "home")
    done = subprocess.run(command_line, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == scope


def test_a_run_that_is_ended_leaves_what_it_had_measured(folder, compile_cache, tmp_path):
    """Guards against the loss of all repeats, and against half a record. SIGKILL waits for none."""
    path = tmp_path / "report.json"
    flags = (f"--target={folder}", "--notransformers", "--num_prompts=1", "--repeats=100000",
             "--max_new_tokens=4", "--dtype=float32", f"--output_json={path}")  # fmt: skip
    program = subprocess.Popen(
        command("jspec.benchmark", *flags), stderr=subprocess.PIPE,
        env=environment(compile_cache, tmp_path / "home"),
    )  # fmt: skip
    for line in program.stderr:
        if line.startswith(b"repeat 20 of"):
            break
    program.kill()
    program.communicate()
    record = json.loads(path.read_text())
    assert not record["is_complete"]
    assert len(record["timings"]["jspec plain"]["seconds"]) >= 19


@pytest.mark.slow
def test_both_sides_with_a_draft_model(folder, compile_cache, tmp_path):
    """Guards against unlike drafts without a word, and figures of the wrong task or framework.

    The draft is the target itself, rounded for jspec alone: in transformers each call keeps all.
    """
    prompts, path = tmp_path / "p.jsonl", tmp_path / "report.json"
    lines = [{"prompt": text, "category": kind} for text, kind in (("ab", "x"), ("cd", "y"))]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, output, errors = run(
        "jspec.benchmark", f"--target={folder}", f"--draft={folder}", "--draft_quantization=int8",
        "--drafters=none,model:3", f"--prompts_file={prompts}", "--repeats=2",
        "--max_new_tokens=12", "--dtype=float32", f"--output_json={path}",
        env=environment(compile_cache, tmp_path / "home"), timeout=300,
    )  # fmt: skip
    assert status == 0, errors
    report = json.loads(path.read_text())
    assert list(report["methods"]) == [
        "jspec plain", "jspec model:3", "transformers plain", "transformers model:3",
        "transformers prompt_lookup:2",
    ]  # fmt: skip
    assert all(method["same_answers"] == 2 for method in report["methods"].values())
    assert report["timings"]["transformers model:3"]["round_tokens"] == [[8, 8]] * 2
    assert report["timings"]["transformers model:3"]["calls"] == [[2, 2]] * 2
    columns = report["spec_bench"]
    assert columns["transformers model:3"]["overall"]["mean_accepted_tokens"] == 4
    assert columns["transformers plain"]["overall"]["mean_accepted_tokens"] == 1
    assert 1 < columns["jspec model:3"]["tasks"]["x"]["mean_accepted_tokens"] <= 4
    ours, theirs = (
        [report["timings"][f"{side} {method}"] for method in ("plain", "model:3")]
        for side in ("jspec", "transformers")
    )
    for side, (plain, drafting) in (("jspec", ours), ("transformers", theirs)):
        ratios = [plain["seconds"][r][1] / drafting["seconds"][r][1] for r in range(2)]
        found = columns[f"{side} model:3"]["tasks"]["y"]["speedup"]["median"]
        assert found == pytest.approx(sum(ratios) / 2)  # the median of two; equal answers
    assert f"transformers drafts with {folder} in float32: it cannot load jspec's int8" in output
    assert any(line.split()[:2] == ["overall", "2"] for line in output.splitlines())


def test_bad_input(folder, compile_cache, tmp_path):
    """Guards against tracebacks, and against minutes of work before the refusal."""
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    good = tmp_path / "good.jsonl"
    good.write_text('{"prompt": "a"}\n')
    cases = {
        "--drafters=magic": "expected a drafter among",
        "--drafters=": "expected each drafter once, got none",
        "--drafters=none,none": "expected each drafter once, got none,none",
        "--drafters=none:3": "expected num_draft_tokens with a drafter that drafts, got 3 with",
        "--drafters=none,model": "expected --draft with a drafter among model",
        "--drafter=ngram": "expected --drafters, a list; got --drafter=ngram",
        "--draft_layers=2": "draft_layers with a drafter that reads it (layer_skip), got it with",
        "--repeats=0": "expected repeats from 1 to 1000000, got 0",
        "--num_prompts=0": "expected num_prompts from 1 to 1000000, got 0",
        "--num_draft_tokens=many": "whole number",
        "--drafters=prompt_lookup:0": "num_draft_tokens from 1",
        "--num_draft_tokens=0": "num_draft_tokens from 1",
        "--max_new_tokens=0": "max_new_tokens of at least 1",
        f"--prompts_file={empty}": "at least one prompt",
        f"--prompts_file={tmp_path / 'none'}": "No such file",
        f"--output_json={tmp_path / 'no' / 'out.json'}": "there is no folder",
        f"--output_json={good}": "expected another file to write to than is read",
        "--target=nowhere": "no model 'nowhere'",
        "--dtype=int8": "dtype",
        "--draft_quantization=int4": "expected --draft with --draft_quantization",
        "--quick": "expected --quick with --roofline",
        "--roofline --num_prompts=3": "expected --roofline without --prompts_file",
        "--synthetic_acceptance=": "expected rates from 0 to 1 in --synthetic_acceptance, got none",
        "--compiled": "expected --compiled where transformers is measured",
        "--transformers --target_quantization=int8": "--transformers without --target_quantization",
    }
    base = [f"--target={folder}", "--notransformers", f"--prompts_file={good}"]
    few = ["--num_prompts=2", "--target=nowhere", f"--prompts_file={good}"]
    lines = json.dumps([*([*base, *flags.split()] for flags in cases), few])
    done = subprocess.run(
        [sys.executable, "-c", _MANY, lines],
        env=environment(compile_cache, tmp_path / "home"),
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
    *outcomes, (_, _, errors) = json.loads(done.stdout)
    notes = errors.splitlines()[:2]
    assert notes[0].startswith("note: transformers is not measured: torch is not installed")
    assert notes[1] == f"note: {good} has 1 of 2 prompts"
    for outcome, message in zip(outcomes, cases.values(), strict=True):
        assert message in check_refusal(*outcome)

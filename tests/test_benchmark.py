"""python -m jspec.benchmark. In its own processes: its flags have names of jspec.generate's."""

import json
import math
import subprocess
import sys

import jax
import pytest

from tests.programs import check_refusal, environment, run, run_many, write_lines
from tests.tiny_models import save_folder

_WITHOUT_TORCH = """
from jspec.lab.benchmarking import measurement
measurement.has_transformers = lambda: False
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_folder(tmp_path_factory.mktemp("model") / "tiny", num_layers=1)


# The program, in a process in which some of transformers' methods fail.
_FAILING = """
import sys
from jspec import benchmark
from jspec.cli import program as cli
from jspec.lab.benchmarking import answers, compare, measurement

class Models:
    def __init__(self, target, draft, **options):
        if "all" in sys.argv:
            raise MemoryError("too much")

    def method(self, drafter, number, max_new_tokens):
        def generate(prompt, seed):
            if drafter == "prompt_lookup":
                raise RuntimeError("no\\n compiler")
            return answers.Generated([1] * max_new_tokens, max_new_tokens - 1, max_new_tokens - 1)
        return generate

measurement.has_transformers = lambda: True
compare.TransformersModels = Models
cli.run_main(lambda _: benchmark.main(), max_arguments=1)
"""


@pytest.mark.parametrize("failing", ["one", pytest.param("all", marks=pytest.mark.slow)])
def test_a_report_on_a_tiny_model(folder, compile_cache, tmp_path, failing):
    """Guards against a report that cannot be made again: raw timings, flags and versions.

    And against a record lost because torch's compiler lacks something: a method that fails is left
    out, and it is said why.
    """
    prompts = write_lines(tmp_path / "p.jsonl", [{"prompt": f"text {i}"} for i in range(5)])
    path = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-c", _FAILING, f"--target={folder}", f"--prompts_file={prompts}",
         "--num_prompts=2", "--repeats=3", "--max_new_tokens=6", "--dtype=float32",
         "--drafters=none,prompt_lookup:2", f"--output_json={path}", failing],
        env=environment(compile_cache, tmp_path / "home"), capture_output=True, check=False,
    )  # fmt: skip
    output, errors = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == 0, errors
    assert errors.index("warming up jspec prompt_lookup:2") < errors.index("repeat 1 of 3")
    report = json.loads(path.read_text())
    assert report["is_complete"]
    failed = {"transformers prompt_lookup:2": "RuntimeError: no compiler"}
    every = dict.fromkeys(["transformers plain", *failed], "MemoryError: too much")
    assert report["left_out"] == (failed if failing == "one" else every)
    for name, reason in report["left_out"].items():
        assert f"note: {name} is left out: {reason}\n" in errors
    measured = [] if failing == "all" else ["transformers plain"]
    assert list(report["methods"]) == ["jspec plain", "jspec prompt_lookup:2", *measured]
    assert report["peak_bytes"] > 1e7
    plain, lookup, *_ = report["methods"].values()
    assert plain["same_answers"] == lookup["same_answers"] == 2  # float32, greedy: invariant 2
    ratio, inverse = lookup["ratio_to"]["jspec plain"], plain["ratio_to"]["jspec prompt_lookup:2"]
    assert ratio["low"] <= ratio["median"] <= ratio["high"]
    assert ratio["median"] * inverse["median"] == pytest.approx(1)
    timing = report["timings"]["jspec plain"]
    assert [len(row) for row in timing["seconds"]] == [2] * 3
    assert timing["tokens"] == [[6, 6]] * 3
    assert all(seconds > 0 for row in timing["seconds"] for seconds in row)
    rows = [line.split() for line in output.splitlines()]
    assert rows[1][:2] == ["jspec", "plain"]
    assert rows[2][:2] == ["jspec", "prompt_lookup:2"]
    assert "2/2" in rows[1]
    assert "\npeak memory of jspec" in output


# Answers fail from the twelfth on: after those that warm up the two methods, and the first prompt
# of the second repeat.
_BREAK_OFF = """
from jspec.common.errors import InputError
from jspec.generation.generator import Generator
right, calls = Generator.generate, []
def fail(*args):
    calls.append(args)
    if len(calls) == 12:
        raise InputError("broken off")
    return right(*args)
Generator.generate = fail
"""


def test_a_run_that_was_broken_off_is_gone_on_with(folder, compile_cache, tmp_path):
    """What was measured is kept, and not timed again; another flag or prompt is refused."""
    path, prompts = tmp_path / "report.json", tmp_path / "p.jsonl"
    begun = tmp_path / "begun.json"
    write_lines(prompts, [{"prompt": f"text {i}"} for i in range(3)])
    line = [f"--target={folder}", "--notransformers", f"--prompts_file={prompts}", "--repeats=2",
            "--max_new_tokens=4", "--dtype=float32", "--drafters=none,prompt_lookup:2",
            f"--output_json={path}"]  # fmt: skip
    first = prompts.read_text()
    write = f"import pathlib; prompts = pathlib.Path({str(prompts)!r}); prompts.write_text({{!r}})"
    outcomes = run_many("jspec.benchmark", [
        line,
        f"import shutil; shutil.copy({str(path)!r}, {str(begun)!r})",
        [*line, "--max_new_tokens=5"],
        write.format(first.replace("text 0", "another")), line,
        f"assert open({str(path)!r}).read() == open({str(begun)!r}).read()",
        write.format(first), line,
    ], env=environment(compile_cache, tmp_path / "home"), before=_BREAK_OFF)  # fmt: skip
    assert outcomes[0][2].endswith("error: broken off\n")
    for outcome, message in zip(
        outcomes[1:3], ("expected --max_new_tokens=4, with which", "expected the prompts that"),
        strict=True,
    ):  # fmt: skip
        assert message in check_refusal(*outcome)
    status, output, errors = outcomes[3]
    assert status == 0, errors
    assert f"going on with {path}" in errors
    before, record = (json.loads(file.read_text()) for file in (begun, path))
    assert (before["is_complete"], record["is_complete"]) == (False, True)
    for name, answers in before["answers"].items():
        assert (len(answers[0]), len(answers[1]) in (1, 2)) == (3, True)
        assert record["answers"][name][0] == answers[0]
        assert record["answers"][name][1][: len(answers[1])] == answers[1]
        assert len(record["answers"][name][1]) == 3
    assert [method["same_answers"] for method in record["methods"].values()] == [3, 3]
    assert "jspec prompt_lookup:2" in output


@pytest.mark.slow
def test_a_round_is_calls_drafts_and_choices(folder, compile_cache, tmp_path):
    """And of the machine, without any prompt; a profile holds operations, not Python alone."""
    path, trace = tmp_path / "round.json", tmp_path / "trace"
    status, output, errors = run(
        "jspec.benchmark", "--measure=round", f"--target={folder}", "--dtype=float32", "--quick",
        "--drafters=none", f"--trace_folder={trace}", f"--output_json={path}",
        env=environment(compile_cache, tmp_path / "home"), timeout=300,
    )  # fmt: skip
    assert status == 0, errors
    record = json.loads(path.read_text())
    assert record["is_complete"]
    assert {"date", "versions", "processor", "cores", "native"} <= set(record)
    assert record["machine"]["bandwidth"] > 1e8
    names = [line["name"] for line in record["lines"]]
    assert "call on" in names[0]
    assert "jspec plain: the host, a round" in names
    assert "choice" in names[-1]
    # No more than that: a difference of two times of a tiny model, on a busy machine.
    assert all(math.isfinite(line["seconds"]) for line in record["lines"])
    assert names[0] in output
    (path,) = trace.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    operations = {event.name for plane in planes for line in plane.lines for event in line.events}
    assert any("dot" in name or "fusion" in name for name in operations)


@pytest.mark.slow
def test_methods_and_baselines_with_a_draft_model(folder, compile_cache, tmp_path):
    """Guards against unlike drafts without a word, and figures of the wrong task or framework.

    The draft is the target itself, rounded for jspec alone: in transformers each call keeps all.
    """
    lines = [{"prompt": text, "category": kind} for text, kind in (("ab", "x"), ("cd", "y"))]
    prompts, path = write_lines(tmp_path / "p.jsonl", lines), tmp_path / "report.json"
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
    ]  # fmt: skip
    assert all(method["same_answers"] == 2 for method in report["methods"].values())
    assert report["timings"]["transformers model:3"]["round_tokens"] == [[8, 8]] * 2
    assert report["timings"]["transformers model:3"]["calls"] == [[2, 2]] * 2
    columns = report["spec_bench"]
    assert columns["transformers model:3"]["overall"]["mean_accepted_tokens"] == 4
    assert columns["transformers plain"]["overall"]["mean_accepted_tokens"] == 1
    assert 1 < columns["jspec model:3"]["tasks"]["x"]["mean_accepted_tokens"] <= 4
    for side in ("jspec", "transformers"):
        plain, drafting = (report["timings"][f"{side} {name}"] for name in ("plain", "model:3"))
        ratios = [plain["seconds"][r][1] / drafting["seconds"][r][1] for r in range(2)]
        median = columns[f"{side} model:3"]["tasks"]["y"]["speedup"]["median"]
        assert median == pytest.approx(sum(ratios) / 2)  # the median of two; equal answers
    assert f"transformers drafts with {folder} in float32: it cannot load jspec's int8" in errors
    assert any(line.split()[:2] == ["overall", "2"] for line in output.splitlines())


def test_bad_input(folder, compile_cache, tmp_path):
    """Guards against tracebacks, and against minutes of work before the refusal."""
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    good = tmp_path / "good.jsonl"
    good.write_text('{"prompt": "a"}\n')
    cases = {
        "--drafters=magic": "expected a drafter among",
        "--drafters=": "expected each drafter once, got no drafter",
        "--drafters=none,model": "expected --draft with a drafter among model",
        "--drafter=ngram": "expected --drafters alone, which lists drafters; got --drafter=ngram",
        "--draft_layers=2": "draft_layers with a drafter that reads it (layer_skip), got it with",
        "--repeats=0": "expected repeats from 1 to 1000000, got 0",
        f"--prompts_file={empty}": "at least one prompt",
        f"--output_json={tmp_path / 'no' / 'out.json'}": "there is no folder",
        f"--output_json={good}": "expected another file to write to than is read",
        "--draft_quantization=int4": "expected --draft with --draft_quantization",
        "--quick": "expected --quick with --measure=round, got it with methods",
        "--llama_cpp=folder": "--llama_cpp with models of .gguf files, got",
        f"--llama_cpp={tmp_path} --target=smollm2-135m-instruct": "no llama-completion",
        "--llama_cpp=folder --coordinator=localhost:1": "--llama_cpp without --coordinator",
        "--coordinator=localhost:1": "expected --mesh, --coordinator, --num_processes and",
        "--compiled": "expected --compiled where transformers is measured",
        "--transformers --target_quantization=int8": "--transformers without --target_quantization",
        "--suite=spec": "expected suite among open; got 'spec'",
        "--suite=open --transformers": "expected --transformers with --measure=methods, got it",
        "--suite=open --temperature=0": "expected --temperature above 0 with --suite",
        "--minutes=1": "expected --minutes with --measure=suite, got it with methods",
    }
    modes = {
        "round --prompts_file=x": "expected --prompts_file with --measure=methods or suite or",
        "round --suite=open": "expected --suite without --measure=round",
        "suite": "expected --suite, one of open, with --measure=suite",
        "server --draft_layers=2": "expected --measure=server without options of drafters",
        "server --drafters=none": "expected --drafters with --measure=methods or suite or round",
        "server --streams=": "expected whole numbers in --streams, got none",
        "operations --batch_sizes=1,-2": "expected whole numbers in --batch_sizes, got '1,-2'",
    }
    cases |= {f"--measure={line}": message for line, message in modes.items()}
    usual = [f"--target={folder}", "--notransformers", f"--prompts_file={good}"]
    named = ("--measure", "--suite")  # which take no target, or another
    lines = [[*([] if flags.startswith(named) else usual), *flags.split()] for flags in cases]
    few = ["--num_prompts=2", "--target=nowhere", f"--prompts_file={good}"]
    env = environment(compile_cache, tmp_path / "home")
    *outcomes, (_, _, errors) = run_many(
        "jspec.benchmark", [*lines, few], env=env, before=_WITHOUT_TORCH
    )
    notes = errors.splitlines()[:2]
    assert notes[0].startswith("note: transformers is not measured: torch is not installed")
    assert notes[1] == f"note: {good} has 1 of 2 prompts"
    for outcome, message in zip(outcomes, cases.values(), strict=True):
        assert message in check_refusal(*outcome)

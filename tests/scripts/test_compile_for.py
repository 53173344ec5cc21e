"""scripts/compile_for.py: its refusals, and what a GPU's compiler makes of jspec's programs."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from jspec.models import PRESETS
from jspec.models.families.hf_config import to_hf_config
from tests.programs import check_refusal, environment, read_lines, refuse_all

pytestmark = pytest.mark.usefixtures("lines_of_code")
_ROOT = pathlib.Path(__file__).parents[2]
_SCRIPT = _ROOT / "scripts" / "compile_for.py"
_PLAIN = ["--device=h200", "--target=llama-3.2-1b", "--drafter=none"]


@pytest.fixture
def call(tmp_path):
    """Returns a function that runs the script: status, output and errors."""

    def run(*arguments, **variables):
        usual = {
            "JSPEC_CACHE": str(tmp_path),
            "XLA_FLAGS": "",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
        }
        done = subprocess.run(
            [sys.executable, str(_SCRIPT), *arguments], capture_output=True, text=True,
            env={**os.environ, **usual, **variables}, timeout=300,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture
def records(call, tmp_path):
    """Returns a function that runs the script and returns what it has written of each program."""

    def run(*arguments, **variables):
        path = tmp_path / "records.jsonl"
        status, output, errors = call(*arguments, f"--output_json={path}", **variables)
        assert (status, errors) == (0, "")
        assert output
        return read_lines(path)

    return run


def test_bad_input_is_refused(compile_cache, tmp_path):
    cases = {"--device=h300": "device", "--batch_size=0": "batch_size"}
    refuse_all("scripts.compile_for", cases, env=environment(compile_cache, tmp_path))


def test_a_missing_compiler_names_what_installs_it(call, tmp_path):
    """Python's own packages are hidden by one that says it has none."""
    hide = tmp_path / "sitecustomize.py"
    hide.write_text(
        "import sys\nsys.modules.update(jax_cuda12_plugin=None, jax_cuda13_plugin=None)\n"
    )
    line = check_refusal(*call(*_PLAIN, PYTHONPATH=f"{tmp_path}:{_SCRIPT.parents[1]}"))
    assert 'pip install -e ".[compile-gpu]"' in line


@pytest.mark.compile_gpu
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--programs=walk"], "prefill:TOKENS"),
        (["--programs=prefill:256", "--cache=128"], "at most --cache=128"),
        (["--programs="], "got none"),
        (["--drafter=prompt_lookup", "--num_draft_tokens=4", "--cache=4"], "a call, got 5"),
        (["--cache=200000"], "the context of the target"),
        (["--programs=run,prefill:2048"], "at most --cache=1024"),  # before any compiling
        (["--target=llama-9b"], "preset"),
        (["--target=llama3.1-70b", "--device=h100"], "within 83.2 GB of h100, got one of 141.5 GB"),
        (["--target_quantization=packed"], "int4"),
        (
            ["--draft=random:llama3.2-1b", "--drafter=model", "--draft_vocab_size=9"],
            "draft_vocab_size",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, arguments, message):
    assert message in check_refusal(*call(*_PLAIN, *arguments))


@pytest.mark.compile_gpu
def test_a_run_is_one_graph_unless_told_otherwise(records):
    """The options of `kernels.run_options`; without them the host drives the loop."""
    (usual,), (without,) = records(*_PLAIN), records(*_PLAIN, JSPEC_ONE_GRAPH="0")
    assert (usual["is_one_graph"], without["is_one_graph"]) == (True, False)
    flags = "--xla_gpu_graph_min_graph_size=5"
    (users,) = records(*_PLAIN, XLA_FLAGS=flags)
    assert users["is_one_graph"] is False
    assert (usual["environment"]["XLA_FLAGS"], users["environment"]["XLA_FLAGS"]) == ("", flags)
    assert without["environment"]["JSPEC_ONE_GRAPH"] == "0"
    assert usual["versions"]["jax"] == jax.__version__
    assert "date" in usual


@pytest.mark.compile_gpu
@pytest.mark.parametrize(
    ("arguments", "gigabytes", "moves"),
    [
        ([], 2.51, 0),
        (["--target_quantization=int8"], 1.28, 0),
        (["--target=llama-3.2-3b"], 6.54, 28),
        (["--target=llama-3.2-3b", "--drafter=eagle", "--num_draft_tokens=4"], 7.04, 30),
        (["--target=llama-3.2-3b", "--draft=llama-3.2-1b", "--drafter=model",
          "--num_draft_tokens=4"], 9.05, 59),
        (["--temperature=1", "--top_k=50", "--top_p=0.9"], 2.51, 0),
    ],
)  # fmt: skip
def test_the_programs_are_one_graph_and_copy_nothing(records, arguments, gigabytes, moves):
    """XLA pads the values' cache of the 3B, a layer of 28; more would be a mistake of ours."""
    for record in records(*_PLAIN, "--programs=run,prefill:64", *arguments):
        is_run = record["program"] == "run"
        if is_run:  # a prefill of the target leaves a draft out
            assert record["argument_bytes"] == pytest.approx(1e9 * gigabytes, rel=0.02)
        assert record["moves"] <= (moves if is_run else 28)
        assert record["is_one_graph"]
        assert record["loops_without_condition"] == 0
        assert record["temporary_bytes"] <= 64e6


@pytest.mark.compile_gpu
def test_a_device_of_two_holds_half(records):
    (alone,), (half,) = records(*_PLAIN), records(*_PLAIN, "--mesh=model:2")
    assert half["argument_bytes"] < 0.55 * alone["argument_bytes"]
    assert half["moves"] == 0


@pytest.mark.compile_gpu
def test_weights_that_are_decoded_to_memory_are_seen(records):
    """The negative control: XLA alone decodes every packed weight before its product."""
    (record,) = records(*_PLAIN, "--target_quantization=q4_0", JSPEC_KERNELS="xla")
    assert record["moves"] > 16  # more than one a layer
    assert record["temporary_bytes"] > 64e6


@pytest.mark.compile_tpu
@pytest.mark.parametrize("device", ["v5e", "v6e"])
@pytest.mark.parametrize(("draft", "rows"), [(None, 1), ("llama3.2-1b", 1), (None, 8)])
def test_a_tpu_moves_no_cache_and_no_weight(device, draft, rows, records, tmp_path):
    """The 1B alone, and the 3B with the 1B, of two layers with real widths."""
    folders = {}
    for name in ("llama3.2-1b", "llama3.2-3b"):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        config = to_hf_config(dataclasses.replace(PRESETS[name], num_layers=2))
        (folders[name] / "config.json").write_text(json.dumps(config))
    arguments = [f"--target={folders['llama3.2-1b']}", "--drafter=none"]
    if draft:
        arguments = [f"--target={folders['llama3.2-3b']}", f"--draft={folders[draft]}"]
        arguments.append("--num_draft_tokens=4")
    (record,) = records(f"--device={device}", f"--batch_size={rows}", *arguments)
    assert record["moves"] == 0
    assert record["is_one_graph"] is record["loops_without_condition"] is None

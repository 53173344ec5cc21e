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
from tests.programs import check_refusal, environment, run_many

pytestmark = pytest.mark.usefixtures("lines_of_code")
_ROOT = pathlib.Path(__file__).parents[2]
_SCRIPT = _ROOT / "scripts" / "compile_for.py"
_RECORDS = _ROOT / "benchmarks" / "results" / "2026-11-26-compiled-programs.jsonl"
_MOVES = "copies", "transposes", "conversions", "pads", "moves_around_rounds"
_NONE = dict.fromkeys((*_MOVES, "sorts", "host_waits"), 0)
_PLAIN = ["--device=h200", "--target=llama-3.2-1b", "--drafter=none"]


@pytest.fixture
def call(tmp_path):
    """Returns a function that runs the script: status, output and errors."""

    def run(*arguments, **variables):
        own = {"JSPEC_CACHE": str(tmp_path), "XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
        done = subprocess.run(
            [sys.executable, str(_SCRIPT), *arguments], capture_output=True, text=True,
            env={**os.environ, **own, **variables}, timeout=300,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture
def figures(call, tmp_path):
    """Returns a function that runs the script and returns what it has written of each program."""

    def run(*arguments, **variables):
        path = tmp_path / "figures.jsonl"
        status, output, errors = call(*arguments, f"--output_json={path}", **variables)
        assert (status, errors) == (0, "")
        assert output
        return [json.loads(line) for line in path.read_text().splitlines()]

    return run


def test_bad_input_is_refused(compile_cache, tmp_path):
    names = "device", "batch_size", "num_lines"
    lines = ["--device=h300"], ["--batch_size=0"], ["--num_lines=-1"]
    env = environment(compile_cache, tmp_path)
    for outcome, name in zip(run_many("scripts.compile_for", lines, env=env), names, strict=True):
        assert name in check_refusal(*outcome)


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
        (["--cache=1024", "--cache=200000"], "the context of the target"),  # before any compiling
        (["--target=llama-9b"], "preset"),
        (["--batch_size=64", "--cache=131072"], "--cache="),
        (["--target=llama3.1-70b", "--device=h100"], "do not fit"),
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
def test_a_run_is_one_graph_unless_told_otherwise(figures):
    """The options of `kernels.run_options`; without them the host drives the loop."""
    (own,), (without,) = figures(*_PLAIN), figures(*_PLAIN, JSPEC_ONE_GRAPH="0")
    assert (own["is_one_graph"], own["host_waits"]) == (True, 0)
    assert (without["is_one_graph"], without["host_waits"]) == (False, 1)
    flags = "--xla_gpu_graph_min_graph_size=5"
    (users,) = figures(*_PLAIN, XLA_FLAGS=flags)
    assert users["is_one_graph"] is False
    assert (own["environment"]["XLA_FLAGS"], users["environment"]["XLA_FLAGS"]) == ("", flags)
    assert without["environment"]["JSPEC_ONE_GRAPH"] == "0"
    assert own["versions"]["jax"] == jax.__version__
    assert "date" in own


@pytest.mark.compile_gpu
@pytest.mark.parametrize(
    ("arguments", "launches", "megabytes"),
    [
        ([], 153, 2513),
        (["--target_quantization=int8"], 153, 1279),
        (["--target_quantization=int4"], 153, 823),
        (["--target_quantization=q4_0"], 154, 869),
        (["--target=llama-3.2-3b"], 249, 6562),
        (["--target=llama-3.2-3b", "--drafter=eagle", "--num_draft_tokens=4"], 386, 8433),
        (["--target=llama-3.2-3b", "--draft=llama-3.2-1b", "--drafter=model",
          "--num_draft_tokens=4"], 859, 16694),
        (["--temperature=1", "--top_k=50", "--top_p=0.9"], 219, 2538),
    ],
)  # fmt: skip
def test_the_programs_do_no_more_than_they_did(figures, arguments, launches, megabytes):
    """Holds what docs/accelerators.md says, for jax 0.10.2, with 3 % for another version."""
    (found,) = figures(*_PLAIN, *arguments)
    assert found["launches_per_round"] <= 1.03 * launches
    ideal = found["bytes_ideal"]
    assert ideal <= found["bytes_moved"] <= min(1.03e6 * megabytes, 1.03 * ideal)
    assert found["is_one_graph"]
    assert {name: found[name] for name in _NONE} == _NONE
    assert found["temporary_bytes"] <= 64e6


@pytest.mark.compile_gpu
def test_two_devices_read_half_and_join_twice_a_layer(figures):
    """Besides, the embedding's row and the logits are joined."""
    (alone,), (half,) = figures(*_PLAIN), figures(*_PLAIN, "--mesh=model:2")
    assert (alone["collectives"], half["collectives"]) == (0, 2 * 16 + 2)
    assert half["bytes_moved"] < 0.55 * alone["bytes_moved"]


@pytest.mark.compile_tpu
@pytest.mark.parametrize("device", ["v5e", "v6e"])
@pytest.mark.parametrize(("draft", "rows"), [(None, 1), ("llama3.2-1b", 1), (None, 8)])
def test_a_tpu_moves_no_cache_and_no_weight(device, draft, rows, figures, tmp_path):
    """The 1B alone, and the 3B with the 1B, of two layers each, which have real widths."""
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
    (found,) = figures(f"--device={device}", f"--batch_size={rows}", *arguments)
    assert {name: found[name] for name in _NONE} == _NONE
    assert found["is_one_graph"] is None
    assert found["bytes_ideal"] < found["bytes_moved"]


@pytest.mark.compile_gpu
def test_weights_that_are_converted_in_memory_are_seen(figures):
    """The negative control: without Triton's products XLA makes every weight float32 first."""
    flags = {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false", "JSPEC_KERNELS": "xla"}
    (found,) = figures(*_PLAIN, **flags)
    assert found["conversions"] > 16  # more than one a layer
    assert found["bytes_moved"] > 4 * found["bytes_ideal"]


@pytest.mark.compile_gpu
def test_prefill_and_calls_are_compiled_too(figures):
    found = figures(*_PLAIN, "--programs=prefill:64,call:1,call:64", "--num_lines=3")
    assert [one["program"] for one in found] == ["prefill:64", "call:1", "call:64"]
    for one in found:
        launches, _, sizes = map(sum, zip(*one["kernels"].values(), strict=True))
        assert launches == one["launches_per_round"] > 0
        assert sizes == pytest.approx(one["bytes_moved"])
        assert one["bytes_moved"] > one["bytes_ideal"]


def test_the_page_says_what_the_records_say():
    """Each row of the page is a record's, and on GPUs no host waits, as the page says."""
    page = (_ROOT / "docs" / "accelerators.md").read_text()
    lines = (line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|"))
    rows = [cells for cells in lines if len(cells) == 8 and cells[1].isdecimal()]
    assert len(rows) > 8
    records = [json.loads(line) for line in _RECORDS.read_text().splitlines()]
    recorded = [
        [
            f"{one['batch_size']}",
            f"{one['cache']:,}",
            f"{one['launches_per_round']:,.0f}",
            f"{one['bytes_moved'] / 1e6:,.0f}",
            f"{one['bytes_moved'] / one['bytes_ideal']:.3f}",
            f"{one['temporary_bytes'] / 1e6:,.1f}",
            f"{sum(one.get(name) or 0 for name in _MOVES):.0f}",
        ]
        for one in records
    ]
    for title, *figures in rows:
        device = title.partition(":")[0].lower()
        found = [own for own, one in zip(recorded, records, strict=True) if one["device"] == device]
        assert figures in found, title
    on_gpus = [one for one in records if one["device"] not in ("v5e", "v6e")]
    assert all(one["is_one_graph"] and one["host_waits"] == 0 for one in on_gpus)


def test_accelerators_are_one_page():
    """Guards against a page of figures that nothing has measured."""
    assert len((_ROOT / "docs" / "accelerators.md").read_text()) <= 6000

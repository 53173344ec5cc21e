"""The roofline: what a call reads and does, the least time that takes, and the measured one."""

import json

import pytest

from jspec.analysis.call_cost import CallCost
from jspec.analysis.machine import Machine
from jspec.benchmarking.roofline import Line, call_lines, format_lines
from tests import tiny_models
from tests.programs import environment, run


@pytest.fixture(scope="module")
def lines():
    """Returns the lines of a machine that only reads, and of one that only computes, slowly."""
    model = tiny_models.target()
    reading = list(call_lines(model, "target", Machine(1e9, 1e30)))
    computing = list(call_lines(model, "target", Machine(1e30, 1e9)))
    return reading, computing


def test_the_least_time_is_that_of_the_bytes_or_of_the_operations(lines):
    for line in lines[0]:
        assert line.least_seconds == pytest.approx(line.num_bytes / 1e9)
        assert line.share == pytest.approx(line.least_seconds / line.seconds)
    for line in lines[1]:
        assert line.least_seconds == pytest.approx(line.operations / 1e9)


def test_a_call_of_one_token_and_a_prefill_are_counted_by_hand(lines):
    config = tiny_models.CONFIG
    cost = CallCost(config, float_bytes=4)
    of = {line.name: line for line in lines[0]}
    half = config.max_seq_len // 2
    call = of[f"target: call on 1 tokens, {half} before, 1 rows"]
    assert call.num_bytes == cost.call_bytes(1, context=half)
    assert call.operations == cost.call_operations(1, context=half)
    chunk = of["target: prefill of 64 tokens, 0 before, 1 rows"]
    unseen = 63 * 2 * config.vocab_size * config.embed_dim  # only the last token's logits are made
    assert chunk.operations == cost.call_operations(64, context=0) - unseen


def test_calls_behind_the_models_context_are_left_out(lines):
    most = tiny_models.CONFIG.max_seq_len
    assert most < 1024, "the test would prove nothing"
    assert not any("1024 before" in line.name for line in lines[0])
    assert any("16 rows" in line.name for line in lines[0])


def test_a_line_without_bytes_has_no_share():
    line = Line("a round", 0.5)
    assert line.share is None
    table = format_lines([line, Line("a call", 0.01, 5e6, 1e9, 0.005)], Machine(1e9, 2e11))
    assert table.splitlines()[0].startswith("1.0 GB/s and 200 GFLOP/s")
    assert table.splitlines()[2].split() == ["a", "round", "500.00"]
    assert table.splitlines()[3].split() == ["a", "call", "5.0", "1.00", "5.00", "10.00", "50%"]


def test_the_program(compile_cache, tmp_path):
    """Calls, rounds and the machine, without any prompt."""
    folder, path = tiny_models.save_folder(tmp_path / "tiny"), tmp_path / "roofline.json"
    status, output, errors = run(
        "jspec.benchmark", f"--target={folder}", "--roofline", "--prompts_file=/nowhere",
        "--drafters=none,prompt_lookup:3", "--dtype=float32", f"--output_json={path}",
        env=environment(compile_cache, tmp_path / "home"), timeout=240,
    )  # fmt: skip
    assert status == 0, errors
    record = json.loads(path.read_text())
    assert record["machine"]["bandwidth"] > 1e8
    names = [line["name"] for line in record["lines"]]
    assert names[-1] == "jspec prompt_lookup:3: a round of prompt_lookup, 3 drafts"
    assert all(line["seconds"] > 0 for line in record["lines"])
    assert names[0] in output

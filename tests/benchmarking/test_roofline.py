"""The roofline: what a call reads and does, the least time that takes, and the measured one."""

import json

import jax.numpy as jnp
import pytest

from jspec.analysis.call_cost import CallCost
from jspec.analysis.machine import FewRows, Machine
from jspec.benchmarking.repeated import seconds_each
from jspec.benchmarking.roofline import Line, call_lines, choice_lines, format_lines
from jspec.benchmarking.round_parts import _choose, time_drafting
from jspec.drafters import DrafterOptions
from jspec.sampling import SamplingSettings
from tests import tiny_models
from tests.programs import environment, run


@pytest.fixture(scope="module")
def lines():
    """Returns the lines of a machine that only reads, and of one that only computes, slowly."""
    model = tiny_models.target()
    few_rows = FewRows((1, 2, 4), (1e-9, 2e-9, 6e-9))
    reading = list(call_lines(model, "target", Machine(1e9, 1e30), few_rows))
    computing = list(call_lines(model, "target", Machine(1e30, 1e9), few_rows))
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


def test_what_wider_calls_cost_is_foretold_by_products_of_as_many_rows(lines):
    """Weights at the products' pace, keys and values at the bandwidth; see the fixture."""
    cost = CallCost(tiny_models.CONFIG, float_bytes=4)
    half = tiny_models.CONFIG.max_seq_len // 2
    of = {line.name: line for line in lines[0]}

    def seconds(width, seconds_per_byte, rows=1):
        caches = cost.call_bytes(width, context=half, batch_size=rows) - cost.weight_bytes
        return cost.weight_bytes * seconds_per_byte + caches / 1e9

    one = seconds(1, 1e-9)
    for width, rows, pace in [(1, 1, 1e-9), (2, 1, 2e-9), (3, 1, 4e-9), (4, 1, 6e-9), (1, 4, 6e-9)]:
        line = of[f"target: call on {width} tokens, {half} before, {rows} rows"]
        assert line.expected_ratio == pytest.approx(seconds(width, pace, rows) / one)
        first = of[f"target: call on 1 tokens, {half} before, 1 rows"]
        assert line.ratio == line.seconds / first.seconds
    assert of[f"target: call on 6 tokens, {half} before, 1 rows"].expected_ratio is None


def test_a_loop_less_its_beginning_is_what_its_turns_take(monkeypatch):
    """A clock that a loop of n turns moves by 5 and n times 0.01 seconds."""
    clock = [0.0]

    class Turned:
        def __init__(self, num_turns):
            clock[0] += 5 + 0.01 * int(num_turns)

        def block_until_ready(self):
            return self

    monkeypatch.setattr("jspec.benchmarking.repeated.time.perf_counter", lambda: clock[0])
    assert seconds_each(Turned) == pytest.approx(0.01)


def test_choices_come_with_and_without_drafts_for_several_vocabularies(monkeypatch):
    asked = []

    def time_choice(vocab_size, num_drafts, **options):
        asked.append((vocab_size, num_drafts, options))
        return 1e-3

    monkeypatch.setattr("jspec.benchmarking.roofline.time_choice", time_choice)
    names = [line.name for line in choice_lines(32_000)]
    assert len(set(names)) == len(names) == len(asked) == 3 + 4 + 2 * 4
    assert names[0] == "choice among 32000 ids, 0 drafts, T = 0"
    assert {size for size, *_ in asked} == {32_000, 8192, 128_256}
    assert (32_000, 5, {"temperature": 1.0, "has_law": True}) in asked


@pytest.mark.parametrize(("draft", "last"), [(5, 7), (4, 5)])
def test_acceptance_is_part_of_a_choice(draft, last):
    """The first draft is kept if it is 5, the second never: another token then comes last."""
    logits = jnp.zeros([1, 4, 16]).at[0, 0, 5].set(9).at[0, 1:, 7].set(9)
    zero, none = jnp.zeros([1]), jnp.zeros([1], jnp.int32)
    settings = SamplingSettings(zero, none, zero + 1, zero)
    token = jnp.array([draft], jnp.int32)
    assert _choose(logits, token, settings, has_law=False) == last
    assert _choose(logits[:, :1], token, settings, has_law=False) == 5


@pytest.mark.parametrize("drafter", ["model", "layer_skip", "prompt_lookup+model"])
def test_proposals_are_timed_one_after_the_other(drafter):
    """Guards against a drafter whose state, or the target's, changes its shape on the way."""
    options = DrafterOptions(draft_layers=(0,)) if drafter == "layer_skip" else DrafterOptions()
    target = tiny_models.target()
    assert time_drafting(target, tiny_models.draft(), drafter, options, 2) > 0


def test_calls_behind_the_models_context_are_left_out(lines):
    most = tiny_models.CONFIG.max_seq_len
    assert most < 1024, "the test would prove nothing"
    assert not any("1024 before" in line.name for line in lines[0])
    assert any("16 rows" in line.name for line in lines[0])


def test_a_line_without_bytes_has_no_share():
    line = Line("a round", 0.5)
    assert line.share is None
    table = format_lines(
        [line, Line("a call", 0.01, 5e6, 1e9, 0.005, 1.25, 1.2)], Machine(1e9, 2e11)
    )
    assert table.splitlines()[0].startswith("1.0 GB/s and 200 GFLOP/s")
    assert table.splitlines()[2].split() == ["a", "round", "500.000"]
    cells = ["a", "call", "5.0", "1.00", "5.00", "10.00", "50%", "1.25", "1.20"]
    assert table.splitlines()[3].split() == cells


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
    assert names[-5:] == [
        "jspec plain: the host, a round",
        "jspec prompt_lookup:3: drafting 3",
        "jspec prompt_lookup:3: a round of prompt_lookup, 0 drafts",
        "jspec prompt_lookup:3: a round of prompt_lookup, 3 drafts",
        "jspec prompt_lookup:3: the host, a round",
    ]
    assert all(line["seconds"] > 0 for line in record["lines"])
    assert names[0] in output

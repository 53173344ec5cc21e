"""The roofline: what a call reads and does, the least time that takes, and the measured one."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.evaluation.analysis.call_cost import CallCost
from jspec.evaluation.analysis.machine import Machine
from jspec.evaluation.benchmarking.call_parts import (
    CallParts,
    CallShape,
    attention_loop,
    elementwise_loop,
    product_loop,
    summarise_turns,
    time_parts,
)
from jspec.evaluation.benchmarking.roofline import (
    FULL,
    QUICK,
    call_lines,
    choice_lines,
    measure_roofline,
)
from jspec.evaluation.benchmarking.roofline_table import Line, format_lines
from jspec.evaluation.benchmarking.round_parts import _choose
from jspec.kernels import first_argmax, rotate_heads, swiglu
from jspec.models import KVCache
from jspec.models.layers import RMSNorm, linear
from jspec.sampling.settings import SamplingSettings
from jspec.weights.quantize import quantize_params
from tests import tiny_models
from tests.programs import environment, run


def fake_times(_, shapes, repeats):
    """Yields calls of which 10 of 100 ms are none of the parts, on a machine that slows down."""
    for shape in shapes:
        own, first = [], []
        for slow in (1, 2, 3, 5, 8):
            rows, width = slow * shape.width * shape.batch_size, slow * shape.width
            own.append(CallParts(0.1 * rows, 0.07 * rows, 0.01 * width, 0.01 * rows))
            first.append(CallParts(0.1 * slow, 0.07 * slow, 0.01 * slow, 0.01 * slow))
        yield summarise_turns(shape, own, first)


@pytest.fixture
def lines(monkeypatch):
    """Returns the lines of a machine that only reads, and of one that only computes, slowly."""
    monkeypatch.setattr("jspec.evaluation.benchmarking.roofline.time_parts", fake_times)
    monkeypatch.setattr("jspec.evaluation.benchmarking.roofline.time_call", lambda *_, **__: 1.0)
    lines = list(call_lines(tiny_models.target(), "target"))
    assert all(line.least_seconds is line.share is None for line in lines)
    return tuple([line.on(m) for line in lines] for m in (Machine(1e9, 1e30), Machine(1e30, 1e9)))


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
    chunk = of["target: prefill of 64 tokens"]
    unseen = 63 * 2 * config.vocab_size * config.embed_dim  # only the last token's logits are made
    assert chunk.operations == cost.call_operations(64, context=0) - unseen


def test_what_wider_calls_cost_is_predicted_by_their_parts(lines):
    """What a call has beside them is that of the call on one token."""
    of = {line.name: line for line in lines[0]}
    half = tiny_models.CONFIG.max_seq_len // 2
    for width, rows, predicted in [(1, 1, 1.0), (3, 1, 2.8), (16, 1, 14.5), (1, 4, 3.4)]:
        line = of[f"target: call on {width} tokens, {half} before, {rows} rows"]
        assert line.expected_ratio == pytest.approx(predicted)
        assert line.ratio == pytest.approx(width * rows)
    chunk = of["target: prefill of 64 tokens"]
    assert (chunk.ratio, chunk.expected_ratio) == (pytest.approx(1 / 0.3), None)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_parts_of_a_call_run_by_turns_with_the_first_call(quantization, monkeypatch):
    """Guards against a loop that cannot run, for other weights or several rows."""
    model = tiny_models.target()
    if quantization:
        params = quantize_params(model.params, model.config, quantization)
        model = dataclasses.replace(model, params=params, quantization=quantization)

    def seconds_in_turn(loops, repeats):
        for loop in loops.values():
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(loop(jnp.int32(2))))
        assert list(loops)[:2] == [("own", "call"), ("first", "call")]
        times = {"own": 3.0, "first": 2.0}
        return [{key: times[key[0]] * turn for key in loops} for turn in range(1, 1 + repeats)]

    monkeypatch.setattr("jspec.evaluation.benchmarking.call_parts.seconds_in_turn", seconds_in_turn)
    shapes = [CallShape(1, 8, 1), CallShape(3, 8, 2)]
    found = list(time_parts(model, shapes, 3))
    assert [one.shape for one in found] == shapes
    for one in found:  # the first one is compared with itself
        assert one.seconds == CallParts(6, 6, 6, 6)
        assert (one.ratio, one.expected_ratio, one.first_seconds) == (1.5, 2.5, 4)


def test_every_product_and_every_layer_is_in_the_loops(monkeypatch):
    """Four products, two norms, attention, rotation and gate a layer; head, norm and choice."""
    model, attended, multiplied = tiny_models.target(), [], []
    normed, chosen = [], []
    attend = KVCache.attend
    monkeypatch.setattr(KVCache, "attend", lambda *a: attended.append(1) or attend(*a))
    monkeypatch.setattr(
        "jspec.evaluation.benchmarking.call_parts.linear",
        lambda inputs, kernel, n: multiplied.append(kernel.size) or linear(inputs, kernel, n),
    )
    norm = RMSNorm.__call__
    monkeypatch.setattr(RMSNorm, "__call__", lambda *a: normed.append(1) or norm(*a))
    for made in (rotate_heads, swiglu, first_argmax):
        count = functools.partial(lambda made, *a: chosen.append(made) or made(*a), made)
        monkeypatch.setattr(f"jspec.evaluation.benchmarking.call_parts.{made.__name__}", count)
    product_loop(model, CallShape(3, 8, 1))(jnp.int32(1))
    attention_loop(model, CallShape(2, 8, 1))(jnp.int32(1))
    elementwise_loop(model, CallShape(2, 8, 3))(jnp.int32(1))
    assert len(attended) == tiny_models.CONFIG.num_layers
    assert chosen == [rotate_heads, swiglu] * tiny_models.CONFIG.num_layers + [first_argmax]
    assert len(normed) == 2 * tiny_models.CONFIG.num_layers + 1
    assert len(multiplied) == 4 * tiny_models.CONFIG.num_layers + 1
    assert sum(multiplied) == CallCost(model.config).num_multiplied


def test_the_machine_counts_as_it_was_at_its_best(monkeypatch):
    """Before or after the rest: its neighbours may have been busy at the beginning."""
    machines = iter([Machine(1e9, 3e9), Machine(2e9, 1e9)])
    module = "jspec.evaluation.benchmarking.roofline"
    monkeypatch.setattr(f"{module}.measure_machine", lambda dtype: next(machines))
    monkeypatch.setattr(f"{module}.call_lines", lambda *_: iter([Line("call", 0.01, 1e7, 6e6)]))
    monkeypatch.setattr(f"{module}.choice_lines", lambda _: iter([]))
    early, last = measure_roofline(tiny_models.target(), None, {})  # what is known is told at once
    assert early.record["lines"][0]["least_seconds"] == 0.01
    assert last.record["machine"] == {"bandwidth": 2e9, "flop_rate": 3e9}
    assert last.record["lines"][0]["least_seconds"] == 0.005
    assert "2.0 GB/s and 3 GFLOP/s" in last.text


def test_a_quick_roofline_measures_fewer_calls_less_often(monkeypatch):
    """And still those on which a drafter's worth depends: one token, and drafts with one more."""
    asked = []

    def time_parts(_, shapes, repeats):
        asked.append((list(shapes), repeats))
        return iter([])

    monkeypatch.setattr("jspec.evaluation.benchmarking.roofline.time_parts", time_parts)
    monkeypatch.setattr("jspec.evaluation.benchmarking.roofline.time_call", lambda *_, **__: 1.0)
    model = tiny_models.make_model(dataclasses.replace(tiny_models.CONFIG, max_seq_len=9000))
    for scope in (FULL, QUICK):
        list(call_lines(model, "target", scope))
    (full, often), (quick, seldom) = asked
    assert set(quick) < set(full)
    assert {CallShape(1, 128, 1), CallShape(6, 128, 1)} < set(quick)
    assert len(quick) <= len(full) / 2
    assert seldom <= often / 3


def test_choices_come_with_and_without_drafts_for_several_vocabularies(monkeypatch):
    asked = []

    def choice_loop(vocab_size, num_drafts, **options):
        asked.append((vocab_size, num_drafts, options))

    module = "jspec.evaluation.benchmarking.roofline"
    monkeypatch.setattr(f"{module}.choice_loop", choice_loop)
    monkeypatch.setattr(f"{module}.seconds_each", lambda loop: 1e-3)
    names = [line.name for line in choice_lines(32_000)]
    assert len(set(names)) == len(names) == len(asked) == 3 + 4 + 2 * 4
    assert names[0] == "choice among 32000 ids, 0 drafts, T = 0"
    assert {size for size, *_ in asked} == {32_000, 8192, 128_256}
    assert (32_000, 5, {"temperature": 1.0, "has_distribution": True}) in asked


@pytest.mark.parametrize(("draft", "last"), [(5, 7), (4, 5)])
def test_acceptance_is_part_of_a_choice(draft, last):
    """The first draft is kept if it is 5, the second never: another token then comes last."""
    logits = jnp.zeros([1, 4, 16]).at[0, 0, 5].set(9).at[0, 1:, 7].set(9)
    zero, none = jnp.zeros([1]), jnp.zeros([1], jnp.int32)
    settings = SamplingSettings(zero, none, zero + 1, zero)
    token = jnp.array([draft], jnp.int32)
    assert _choose(logits, token, settings, has_distribution=False) == last
    assert _choose(logits[:, :1], token, settings, has_distribution=False) == 5


def test_calls_beyond_the_models_context_are_left_out(lines):
    most = tiny_models.CONFIG.max_seq_len
    assert most < 1024, "the test would prove nothing"
    assert not any("1024 before" in line.name for line in lines[0])
    assert any("16 rows" in line.name for line in lines[0])


def test_a_line_without_bytes_has_no_share():
    line = Line("a round", 0.5)
    assert line.on(Machine(1e9, 1e9)).share is None
    call = Line("a call", 0.01, 5e6, 1e9, 0.005, 1.25, 1.2, 0.008, 0.001, 0.0005)
    table = format_lines([line, call], Machine(1e9, 2e11))
    assert table.splitlines()[0].startswith("1.0 GB/s and 200 GFLOP/s")
    assert table.splitlines()[2].split() == ["a", "round", *"---", "500.000", *"------"]
    cells = ["a", "call", "5.0", "1.00", "5.00", "10.000", "50%", "8.00", "1.00", "0.50",
             "1.25", "1.20"]  # fmt: skip
    assert table.splitlines()[3].split() == cells
    assert len(table.splitlines()) == 4
    assert "slower while" in format_lines([call._replace(least_seconds=0.02)], Machine(1e9, 2e11))


def test_the_program(compile_cache, tmp_path):
    """Calls, rounds and the machine, without any prompt."""
    folder, path = tiny_models.save_folder(tmp_path / "tiny"), tmp_path / "roofline.json"
    status, output, errors = run(
        "jspec.benchmark", f"--target={folder}", "--measure=roofline", "--quick",
        "--drafters=none,prompt_lookup:3", "--dtype=float32", f"--output_json={path}",
        env=environment(compile_cache, tmp_path / "home"), timeout=240,
    )  # fmt: skip
    assert status == 0, errors
    record = json.loads(path.read_text())
    assert record["is_complete"]
    assert record["machine"]["bandwidth"] > 1e8
    names = [line["name"] for line in record["lines"]]
    rounds = names.index("jspec plain: the host, a round")
    assert names[rounds : rounds + 5] == [
        "jspec plain: the host, a round",
        "jspec prompt_lookup:3: a round without drafts",
        "jspec prompt_lookup:3: prompt_lookup drafts 3",
        "jspec prompt_lookup:3: a round of prompt_lookup, 3 drafts",
        "jspec prompt_lookup:3: the host, a round",
    ]
    assert "call on" in names[0]
    assert "choice" in names[-1]
    # No more than that: a difference of two times of a tiny model, on a busy machine.
    assert all(np.isfinite(line["seconds"]) for line in record["lines"])
    (one,) = [line for line in record["lines"] if "a round of" in line["name"]]
    assert one["ratio"] >= 1  # more drafts never cost less
    assert names[0] in output

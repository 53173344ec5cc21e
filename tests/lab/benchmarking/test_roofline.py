"""The roofline: what a call reads and does, the least time that takes, and the measured time."""

import dataclasses
import functools
import math
import types

import jax
import jax.numpy as jnp
import pytest

from jspec.drafters import DrafterOptions
from jspec.generation.auto import KnownCosts
from jspec.generation.costs import RoundCosts
from jspec.lab.analysis.call_cost import CallCost, Machine
from jspec.lab.benchmarking import roofline
from jspec.lab.benchmarking.roofline import (
    call_lines,
    choose,
    format_lines,
    measure_roofline,
    model_cost,
    on_machine,
    round_lines,
)
from jspec.sampling.settings import SamplingSettings
from tests import tiny_models


def fake_turns(loops, repeats):
    """Yields times in proportion to the tokens of a call, on a machine that slows down."""
    for slow in (1, 2, 3, 5, 8):
        yield {key: 0.1 * slow * width * rows for key, (width, _, rows) in loops.items()}


@pytest.fixture
def lines(monkeypatch):
    """Returns the lines of a machine that only reads, and of one that only computes, slowly."""
    monkeypatch.setattr(roofline, "call_loop", lambda _, *shape: shape)
    monkeypatch.setattr(roofline, "seconds_in_turn", fake_turns)
    monkeypatch.setattr(roofline, "time_call", lambda *_, **__: 1.0)
    lines = list(call_lines(tiny_models.target(), "target", False))
    machines = Machine(1e9, 1e30), Machine(1e30, 1e9)
    return tuple([on_machine(line, machine) for line in lines] for machine in machines)


def test_a_call_of_one_token_and_a_prefill_are_counted_by_hand(lines):
    """And the least time is that of the bytes or of the operations."""
    config = tiny_models.CONFIG
    cost = CallCost(config, float_bytes=4)
    for reading, computing in zip(*lines, strict=True):
        assert reading["least_seconds"] == pytest.approx(reading["num_bytes"] / 1e9)
        assert reading["share"] == pytest.approx(reading["least_seconds"] / reading["seconds"])
        assert computing["least_seconds"] == pytest.approx(computing["operations"] / 1e9)
    of = {line["name"]: line for line in lines[0]}
    half = config.max_seq_len // 2
    call = of[f"target: call on 1 tokens, {half} before, 1 rows"]
    assert call["num_bytes"] == cost.call_bytes(1, context=half)
    assert call["operations"] == cost.call_operations(1, context=half)
    chunk = of["target: prefill of 64 tokens"]
    unseen = 63 * 2 * config.vocab_size * config.embed_dim  # only the last token's logits are made
    assert chunk["operations"] == cost.call_operations(64, context=0) - unseen


def test_a_drafts_calls_are_those_of_the_head_that_it_uses():
    """Guards against a roofline of another draft than that of the rounds."""
    target, draft = tiny_models.target(), tiny_models.draft()
    cut = roofline.with_own_head(target, draft, DrafterOptions(draft_vocab_size=32))
    rows = cut.params["head"].shape[0]
    assert 32 <= rows < draft.config.vocab_size
    less = (draft.config.vocab_size - rows) * draft.config.embed_dim
    assert model_cost(draft, 4).weight_bytes - model_cost(cut, 4).weight_bytes == 4 * less
    assert math.isfinite(roofline.time_call(cut, 2, 8))  # a difference of two times
    same = roofline.with_own_head(target, draft, DrafterOptions())
    assert (same.config, same.params) == (draft.config, draft.params)


def test_wider_calls_are_compared_with_the_first_in_each_turn(lines):
    """Guards against a ratio of medians, which a machine that slows down would spoil."""
    of = {line["name"]: line for line in lines[0]}
    half = tiny_models.CONFIG.max_seq_len // 2
    for width, rows in [(1, 1), (3, 1), (16, 1), (1, 4)]:
        line = of[f"target: call on {width} tokens, {half} before, {rows} rows"]
        assert line["ratio"] == pytest.approx(width * rows)
        assert line["seconds"] == pytest.approx(0.3 * width * rows)
    assert of["target: prefill of 64 tokens"]["ratio"] == pytest.approx(1 / 0.3)
    # Calls beyond the model's context are left out.
    assert tiny_models.CONFIG.max_seq_len < 1024, "the test would prove nothing"
    assert not any("1024 before" in name for name in of)
    assert any("16 rows" in name for name in of)


def test_the_machine_counts_as_it_was_at_its_best(monkeypatch):
    """Before or after the rest: its neighbours may have been busy at the beginning."""
    machines = iter([Machine(1e9, 3e9), Machine(2e9, 1e9)])
    line = {"name": "call", "seconds": 0.01, "num_bytes": 1e7, "operations": 6e6}
    monkeypatch.setattr(roofline, "measure_machine", lambda dtype: next(machines))
    monkeypatch.setattr(roofline, "call_lines", lambda *_: iter([line]))
    monkeypatch.setattr(roofline, "choice_lines", lambda _: iter([]))
    models = tiny_models.target(), None
    asked = types.SimpleNamespace(
        models=lambda: models, generators=lambda *_: {}, quick=True, trace_folder=None
    )
    early, last = measure_roofline(asked)  # what is known is told at once
    assert early.record["lines"][0]["least_seconds"] == 0.01
    assert last.record["machine"] == {"bandwidth": 2e9, "flop_rate": 3e9}
    assert last.record["lines"][0]["least_seconds"] == 0.005
    assert "2.0 GB/s and 3 GFLOP/s" in last.text


def test_a_quick_roofline_measures_fewer_calls_less_often(monkeypatch):
    """And still those on which a drafter's worth depends: one token, and drafts with one more."""
    asked = []

    def seconds_in_turn(loops, repeats):
        asked.append((loops["own"], repeats))
        return [dict.fromkeys(loops, 1.0)]

    monkeypatch.setattr(roofline, "call_loop", lambda _, *shape: shape)
    monkeypatch.setattr(roofline, "seconds_in_turn", seconds_in_turn)
    monkeypatch.setattr(roofline, "time_call", lambda *_, **__: 1.0)
    model = tiny_models.make_model(dataclasses.replace(tiny_models.CONFIG, max_seq_len=9000))
    calls = []
    for is_quick in (False, True):
        asked.clear()
        list(call_lines(model, "target", is_quick))
        calls.append((dict(asked).keys(), asked[0][1]))
    (full, often), (quick, seldom) = calls
    assert set(quick) < set(full)
    assert {(1, 128, 1), (6, 128, 1)} < set(quick)
    assert len(quick) <= len(full) / 2
    assert seldom <= often / 3


def test_acceptance_is_part_of_a_choice():
    """The first draft is kept if it is 5, the second never: another token then comes last."""
    logits = jnp.zeros([1, 4, 16]).at[0, 0, 5].set(9).at[0, 1:, 7].set(9)
    zero, none = jnp.zeros([1]), jnp.zeros([1], jnp.int32)
    settings = SamplingSettings(zero, none, zero + 1, zero)
    chosen = jax.jit(functools.partial(choose, has_distribution=False))
    five, four = (jnp.array([token], jnp.int32) for token in (5, 4))
    assert [int(chosen(logits, draft, settings)[0]) for draft in (five, four)] == [7, 5]
    assert chosen(logits[:, :1], four, settings) == 5


def test_a_line_without_bytes_has_no_share():
    machine = Machine(1e9, 2e11)
    line = on_machine({"name": "a round", "seconds": 0.5}, machine)
    assert line["share"] is line["ratio"] is None
    call = {"name": "a call", "seconds": 0.01, "num_bytes": 5e6, "operations": 1e9, "ratio": 1.25}
    table = format_lines([line, on_machine(call, machine)], machine)
    assert table.splitlines()[0].startswith("1.0 GB/s and 200 GFLOP/s")
    assert table.splitlines()[2].split() == ["a", "round", *"---", "500.000", *"--"]
    cells = ["a", "call", "5.0", "1.00", "5.00", "10.000", "50%", "1.25"]
    assert table.splitlines()[3].split() == cells
    assert len(table.splitlines()) == 4
    slowed = on_machine(call | {"seconds": 0.004}, machine)
    assert "slower while" in format_lines([slowed], machine)


def test_rounds_are_drafting_the_whole_and_the_host(monkeypatch):
    """Drafting is what a round takes beside the call and the choice."""
    costs = RoundCosts((200,), (0, 4), ("prompt_lookup",), (((0.01, 0.014),),))
    measure = KnownCosts.measure
    monkeypatch.setattr(KnownCosts, "measure", lambda k: k.engine.drafter and costs)
    monkeypatch.setattr(roofline, "time_call", lambda *_: 0.011)
    monkeypatch.setattr(roofline, "seconds_each", lambda _: 0.001)
    kinds = {"plain": "none", "lookup:4": "prompt_lookup"}
    generators = {name: tiny_models.shared_generator(drafter) for name, drafter in kinds.items()}
    assert measure(generators["plain"].round_costs) is None
    lines = list(round_lines(generators))
    assert [line["name"] for line in lines] == [
        "plain: a round without drafts",
        "plain: the host, a round",
        "lookup:4: a round without drafts",
        "lookup:4: prompt_lookup drafts 4",
        "lookup:4: a round of prompt_lookup, 4 drafts",
        "lookup:4: the host, a round",
    ]
    assert 0 < lines[0]["seconds"] < 1
    assert [line["seconds"] for line in lines[2:5]] == pytest.approx([0.01, 0.002, 0.014])
    assert lines[4]["ratio"] == pytest.approx(1.4)

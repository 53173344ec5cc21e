"""Figures of the benchmark's records: which lines they have, and what they refuse."""

import json

import pytest

from jspec.common.errors import InputError
from jspec.lab.benchmarking.figures import (
    draw_record,
    roofline_curves,
    synthetic_curves,
)
from tests.programs import check_refusal, environment, run


def call(role, width, context, rows, seconds):
    return {
        "name": f"{role}: call on {width} tokens, {context} before, {rows} rows",
        "seconds": seconds, "least_seconds": 0.001,
    }  # fmt: skip


LINES = [
    call("target", 1, 8, 1, 0.004),
    call("target", 4, 8, 1, 0.006),
    call("target", 1, 64, 1, 0.008),
    call("target", 1, 8, 16, 0.010),
    {"name": "target: prefill of 64 tokens", "seconds": 1.0},
    call("draft", 1, 8, 1, 0.001),
    call("draft", 2, 8, 1, 0.002),
]


def test_calls_are_shown_along_each_axis():
    """In milliseconds; what a model was not measured at is left out of its line only."""
    by_width, by_context, by_rows = roofline_curves(LINES)
    assert by_width.x == [1, 2, 4]
    assert by_width.lines["target, measured"] == pytest.approx([4, None, 6])
    assert by_width.lines["draft, measured"] == pytest.approx([1, 2, None])
    assert by_context.x == [8, 64]
    assert by_context.lines["target, measured"] == pytest.approx([4, 8])
    assert by_rows.x == [1, 16]
    assert by_rows.lines["target, at least"] == pytest.approx([1, 1])


def test_speed_is_shown_beside_the_theorem_where_there_is_one():
    def line(name, rate, speed, expected):
        speedup = {"median": speed, "low": 0, "high": 9}
        return {"name": name, "rate": rate, "speedup": speedup, "expected_speedup": expected}

    lines = [
        line("model:2", 0.8, 1.5, 1.6), line("lookup", 0.8, 2.0, None),
        line("model:2", 0.6, 1.2, 1.3), line("lookup", 0.6, 1.8, None),
    ]  # fmt: skip
    (curves,) = synthetic_curves(lines)
    assert curves.x == [0.6, 0.8]
    assert curves.lines == {
        "model:2, measured": [1.2, 1.5],
        "model:2, Theorem 3.8": [1.3, 1.6],
        "lookup, measured": [1.8, 2.0],
    }


VERSIONS = {"versions": {"jax": "0.10"}}


@pytest.mark.parametrize(
    "record",
    [
        [],
        {},
        {"flags": {"measure": "roofline"}, "lines": LINES},
        VERSIONS | {"flags": None},
        VERSIONS | {"flags": {"measure": "roofline"}},
        VERSIONS | {"flags": {"measure": "roofline"}, "lines": [1]},
        VERSIONS | {"flags": {"measure": "synthetic"}, "lines": [{}]},
    ],
)
def test_what_is_no_record_is_refused(record):
    with pytest.raises(InputError, match="expected a record of python"):
        draw_record("odd", record)


@pytest.mark.parametrize("kind", ["roofline", "synthetic"])
def test_a_record_without_measurements_is_refused(kind):
    with pytest.raises(InputError, match="expected lines of what was measured, got none"):
        draw_record("empty", VERSIONS | {"flags": {"measure": kind}, "lines": []})


def test_rooflines_of_an_older_benchmark_are_drawn():
    """Their flags say `roofline` where those of today say `measure`."""
    record = VERSIONS | {"flags": {"roofline": True}, "lines": LINES}
    assert draw_record("old", record).png.startswith(b"\x89PNG")
    assert draw_record("old", record | {"flags": {"roofline": False}}) is None


@pytest.mark.parametrize("flags", [{}, {"flags": {}}, {"flags": {"measure": "methods"}}])
def test_a_record_of_answers_has_no_figure(flags):
    """That of a script, of an older benchmark, and of one of today."""
    assert draw_record("answers", VERSIONS | {"timings": {}} | flags) is None


def test_the_program_writes_beside_its_records(tmp_path, compile_cache):
    """It passes over a benchmark of answers, and goes on after what is none."""
    env = environment(compile_cache, tmp_path)
    odd, answers, calls = (tmp_path / f"{name}.jsonl" for name in ("odd", "answers", "calls"))
    odd.write_text("[]")
    answers.write_text(json.dumps(VERSIONS | {"flags": {"measure": "methods"}, "timings": {}}))
    calls.write_text(json.dumps(VERSIONS | {"flags": {"measure": "roofline"}, "lines": LINES}))
    paths = ",".join(map(str, (odd, answers, calls)))
    status, output, errors = run("jspec.benchmark", f"--draw={paths}", env=env)
    assert status == 2
    assert errors == (
        f"note: {answers}: no roofline and no synthetic rates: no figure\n"
        "error: odd: expected a record of python -m jspec.benchmark\n"
    )
    assert output.splitlines() == [str(calls.with_suffix(suffix)) for suffix in (".png", ".svg")]
    assert calls.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in calls.with_suffix(".svg").read_text()
    errors = check_refusal(*run("jspec.benchmark", f"--draw={tmp_path / 'none'}", env=env))
    assert "cannot read a record" in errors

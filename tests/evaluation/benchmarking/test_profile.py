"""Traces summarised: what an operation took by itself, and what the profiler really writes."""

import jax
import jax.numpy as jnp
import pytest

from jspec.common.errors import InputError
from jspec.evaluation.benchmarking.profile import Event, read_trace, summarise_line


def test_an_operations_own_time_is_without_those_within_it():
    """Guards against counting a loop's body twice; numbers are taken off names."""
    events = [
        Event("fusion.3", 20, 30),
        Event("while.2", 0, 100),
        Event("fusion.12.1", 50, 10),
        Event("add", 22, 5),
        Event("copy", 150, 50),
    ]
    line = summarise_line("stream", events)
    assert line["span_seconds"] == pytest.approx(200e-9)
    assert line["busy_seconds"] == pytest.approx(150e-9)
    own = {one["name"]: (one["runs"], one["own_seconds"]) for one in line["operations"]}
    assert own == {
        "while": (1, pytest.approx(60e-9)),
        "fusion": (2, pytest.approx(35e-9)),
        "add": (1, pytest.approx(5e-9)),
        "copy": (1, pytest.approx(50e-9)),
    }
    seconds = [one["own_seconds"] for one in line["operations"]]
    assert seconds == sorted(seconds, reverse=True)


def test_operations_are_found_in_a_real_trace(tmp_path):
    """Guards against another layout of the profiler's files."""
    function = jax.jit(lambda x: jnp.sin(x @ x).sum())
    inputs = jnp.ones([200, 200])
    function(inputs).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        function(inputs).block_until_ready()
    lines = [summarise_line(*line) for line in read_trace(tmp_path)]
    assert any("dot" in one["name"] or "fusion" in one["name"]
               for line in lines for one in line["operations"])  # fmt: skip
    for line in lines:
        own = sum(one["own_seconds"] for one in line["operations"])
        assert own == pytest.approx(line["busy_seconds"])


def test_no_trace_is_an_error_of_one_line(tmp_path):
    with pytest.raises(InputError, match="expected a trace in"):
        list(read_trace(tmp_path))

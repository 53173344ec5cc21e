"""A machine's two rates: what they are rates of."""

import pytest

from jspec.analysis import machine


def test_rates_are_bytes_and_operations_over_seconds(monkeypatch):
    """Guards against half the operations, or bytes of another type."""
    calls = []

    def time_product(rows, inputs, outputs, dtype):
        calls.append((rows, inputs, outputs, dtype))
        return 0.5

    monkeypatch.setattr(machine, "_time_product", time_product)
    monkeypatch.setitem(machine._SIZES, "cpu", (1 << 20, 64, 128))
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        found = machine.measure_machine(dtype)
        (rows, inputs, outputs, _), product = calls[-2:]
        assert (rows, inputs * outputs * size) == (1, 1 << 20)
        assert product == (64, 128, 128, dtype)
        assert found == (2 * (1 << 20), 2 * 2 * 64 * 128 * 128)


def test_a_small_measurement_gives_something_sensible(monkeypatch):
    """On any machine that runs the tests: between 10 MB/s and 100 TB/s, and so on."""
    monkeypatch.setitem(machine._SIZES, "cpu", (1 << 20, 64, 128))
    found = machine.measure_machine("float32")
    assert 1e7 < found.bandwidth < 1e14
    assert 1e7 < found.flop_rate < 1e17


def test_the_fastest_call_counts(monkeypatch):
    """Guards against compilation, or a busy moment, in the figure."""
    clock = iter([0, 100, 0, 1] + [0, 3] * 10)
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    assert machine.least_seconds(lambda: 0) == pytest.approx(1)

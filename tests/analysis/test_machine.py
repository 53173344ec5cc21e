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


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_product_is_timed_with_all_of_its_kernel(monkeypatch, dtype):
    """Guards against another product than the one whose bytes and operations are counted."""
    timed = []

    def time_call(call, values, kernel):
        timed.append((kernel, call(values, kernel)))
        return 0.25

    monkeypatch.setattr(machine, "least_seconds", time_call)
    assert machine._time_product(3, 8, 16, dtype) == 0.25
    ((kernel, product),) = timed
    assert (kernel.shape, kernel.dtype.name) == ((16, 8), dtype)
    assert kernel.nbytes == 8 * 16 * (2 if dtype == "bfloat16" else 4)
    assert product.shape == (1, 3, 16)
    assert (product == 8).all()  # every weight of every row took part


def test_the_fastest_call_counts(monkeypatch):
    """Guards against compilation, or a busy moment, in the figure."""
    clock = iter([0, 100, 0, 1] + [0, 3] * 10)
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    assert machine.least_seconds(lambda: 0) == pytest.approx(1)

"""A machine's two rates: what they are rates of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.evaluation.analysis import machine
from jspec.kernels.device import TimedProducts


def test_rates_are_bytes_and_operations_over_seconds(monkeypatch):
    """Guards against half the operations, or bytes of another type."""
    calls = []

    def time_product(rows, inputs, outputs, dtype, turns):
        calls.append((rows, inputs, outputs, dtype, turns))
        return 0.5

    monkeypatch.setattr(machine, "_time_product", time_product)
    sizes = TimedProducts(1 << 20, 64, 128, 7, "float32")
    monkeypatch.setattr(machine, "timed_products", lambda dtype: sizes)
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        found = machine.measure_machine(dtype)
        (rows, inputs, outputs, *_), product = calls[-2:]
        assert (rows, inputs * outputs * size) == (1, 1 << 20)
        assert product == (64, 128, 128, dtype, 7)
        assert found == (2 * (1 << 20), 2 * 2 * 64 * 128 * 128)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_turn_is_a_product_with_the_whole_kernel(monkeypatch, dtype):
    """Guards against another product than the one whose bytes and operations are counted."""
    kernels, loops, counts = [], [], []

    def linear(values, kernel):
        kernels.append((kernel.shape, kernel.dtype.name))
        product = jnp.einsum("bti,oi->bto", values.astype(kernel.dtype), kernel)
        jax.debug.callback(lambda _: counts.append(product.shape), product.sum())
        return product.astype(jnp.float32)

    monkeypatch.setattr(machine, "linear", linear)
    monkeypatch.setattr(machine, "least_seconds", lambda loop, turns: loops.append(loop) or turns)
    assert machine._time_product(3, 8, 16, dtype, 5) == 5
    values = loops[0](4)
    jax.effects_barrier()
    assert counts == [(1, 3, 16)] * 4
    assert set(kernels) == {((16, 8), dtype)}
    assert np.isfinite(values.astype(jnp.float32)).all()
    assert (loops[0](5) != values).sum() == 1  # each product waits for the one before


def test_the_fastest_run_counts_less_its_beginning(monkeypatch):
    """Guards against compilation, a busy moment or the call of a loop in the figure."""
    clock, slow = [0.0], iter([50, 90, 3, 0, 0, 2, *[1] * 20])

    def loop(count):
        clock[0] += 7 + 0.25 * count + next(slow)

    monkeypatch.setattr(machine.time, "perf_counter", lambda: clock[0])
    assert machine.least_seconds(loop, 4) == pytest.approx(0.25)

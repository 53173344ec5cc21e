"""A machine's two rates: what they are rates of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.kernels.device import TimedProducts
from jspec.lab.analysis import call_cost


def test_rates_are_bytes_and_operations_over_seconds(monkeypatch):
    """Guards against half the operations, or bytes of another type."""
    calls = []

    def product_loop(rows, inputs, outputs, dtype):
        calls.append((rows, inputs, outputs, dtype))

    monkeypatch.setattr(call_cost, "product_loop", product_loop)
    monkeypatch.setattr(call_cost, "least_seconds", lambda loop: 0.5)
    sizes = TimedProducts(1 << 20, 64, 128, "float32")
    monkeypatch.setattr(call_cost, "timed_products", lambda dtype: sizes)
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        actual = call_cost.measure_machine(dtype)
        (rows, inputs, outputs, _), product = calls[-2:]
        assert (rows, inputs * outputs * size) == (1, 1 << 20)
        assert product == (64, 128, 128, dtype)
        assert actual == (2 * (1 << 20), 2 * 2 * 64 * 128 * 128)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_turn_is_a_product_with_the_whole_kernel(monkeypatch, dtype):
    """Guards against another product than the one whose bytes and operations are counted."""
    kernels, counts = [], []

    def linear(values, kernel):
        kernels.append((kernel.shape, kernel.dtype.name))
        product = jnp.einsum("bti,oi->bto", values.astype(kernel.dtype), kernel)
        jax.debug.callback(lambda _: counts.append(product.shape), product.sum())
        return product.astype(jnp.float32)

    monkeypatch.setattr(call_cost, "linear", linear)
    loop = call_cost.product_loop(3, 8, 16, dtype)
    values = np.asarray(loop(jnp.int32(4)).astype(jnp.float32))
    jax.effects_barrier()
    assert counts == [(1, 3, 16)] * 4
    assert set(kernels) == {((16, 8), dtype)}
    assert np.isfinite(values).all()
    after = np.asarray(loop(jnp.int32(1)).astype(jnp.float32))
    assert (after != values).sum() == 1  # each product waits for the one before

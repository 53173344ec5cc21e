"""On a GPU products of few rows have sixteen: one program for plain steps and verify calls."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import kernels
from jspec.kernels import backend
from jspec.kernels.quantized import quantized_product
from jspec.weights.quantize import quantize


def make_kernel(kind):
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(48, 64)), jnp.bfloat16)
    if kind in ("bfloat16", "float32"):
        return weights.astype(kind)
    return quantize(weights, ("down",), kind, jnp.bfloat16)


@pytest.mark.parametrize("kind", ["bfloat16", "float32", "int8", "int4"])
def test_a_gpu_multiplies_sixteen_rows_at_least(kind):
    kernel = make_kernel(kind)
    for count, expected in ((1, 16), (5, 16), (16, 16), (17, 17)):
        rows = jax.ShapeDtypeStruct((count, 64), jnp.float32)
        with kernels.compiling_for("gpu"):
            traced = jax.make_jaxpr(kernels.product)(rows, kernel)
        products = re.findall(r"f32\[(\d+),48\] = dot_general", str(traced))
        assert set(products) == {str(expected)}
        assert traced.out_avals[0].shape == (count, 48)


@pytest.mark.parametrize("kind", ["bfloat16", "float32", "int8", "int4"])
def test_zeros_beside_rows_change_nothing(kind, monkeypatch):
    """Each row's result is the same at any width, bit for bit."""
    kernel = make_kernel(kind)
    rows = jnp.asarray(np.random.default_rng(1).normal(size=(16, 64)), jnp.float32)
    monkeypatch.setattr(backend, "backend", lambda: "gpu")
    monkeypatch.setattr("jspec.kernels.library.is_available", lambda: False)
    monkeypatch.setattr("jspec.kernels.quantized.backend", lambda: "gpu")
    function = quantized_product if kind.startswith("int") else kernels.product
    jax.clear_caches()
    expected = np.asarray(jax.jit(function)(rows, kernel))
    for count in (1, 5, 15):
        outputs = jax.jit(function)(rows[:count], kernel)
        np.testing.assert_array_equal(outputs, expected[:count])
    jax.clear_caches()


def test_a_cpu_multiplies_the_rows_that_are_there():
    rows = jnp.ones([3, 64])
    assert backend.padded(rows) is rows

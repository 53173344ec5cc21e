"""Norms in C++: those of XLA to rounding, and a row's result does not depend on others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.kernels import library as native
from jspec.kernels import rms_norm
from jspec.models.layers import RMSNorm

pytestmark = pytest.mark.usefixtures("library")

SHAPES = [(1, 1, 576), (2, 9, 70), (1, 300, 2048), (3, 2, 5)]


def norm(inputs, scale):
    return RMSNorm(1e-5).apply({"params": {"scale": scale}}, inputs)


def draw(shape, dtype="bfloat16"):
    rng = np.random.default_rng(0)
    scale = rng.uniform(0.5, 2, shape[-1])
    return jnp.asarray(3 * rng.normal(size=shape), jnp.float32), jnp.asarray(scale, dtype)


def check(outputs, inputs, scale):
    wide = np.asarray(inputs, np.float64)
    exact = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    exact *= np.asarray(scale, np.float64)
    np.testing.assert_allclose(outputs, exact, rtol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_they_are_those_of_float64(shape, dtype):
    """Guards the rest behind the last whole step."""
    inputs, scale = draw(shape, dtype)
    assert "jspec_rms_norm" in jax.jit(norm).lower(inputs, scale).as_text()
    check(jax.jit(norm)(inputs, scale), inputs, scale)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_without_the_library_they_are_the_same(dtype, monkeypatch):
    """Nothing is promoted on the way: the scale is of another type than the numbers."""
    monkeypatch.setattr("jspec.kernels.library.is_available", lambda: False)
    inputs, scale = draw((2, 9, 70), dtype)
    check(norm(inputs, scale), inputs, scale)


def test_a_scale_of_another_type_is_left_to_xla():
    """Of two bytes as well, it would be read as bfloat16."""
    inputs, scale = draw((2, 9, 70), "float16")
    check(jax.jit(norm)(inputs, scale), inputs, scale)


def test_the_library_refuses_a_scale_that_it_cannot_read():
    inputs, scale = draw((2, 9, 70), "float16")
    with pytest.raises(Exception, match="neither float32 nor bfloat16"):
        native.call(
            "rms_norm",
            rms_norm.__wrapped__,
            native.floats(*inputs.shape),
            inputs,
            scale,
            jnp.float32(1e-5),
        )


def test_a_rows_result_does_not_depend_on_its_neighbours():
    """XLA's does, from eight rows on."""
    inputs, scale = draw((1, 40, 576))
    together = np.asarray(jax.jit(norm)(inputs, scale))
    for count in (1, 2, 7, 8, 9, 33):
        some = jax.jit(norm)(inputs[:, :count], scale)
        np.testing.assert_array_equal(some, together[:, :count])
    batched = jax.jit(norm)(inputs.reshape(8, 5, 576), scale)
    np.testing.assert_array_equal(batched.reshape(1, 40, 576), together)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_derivatives_are_those_of_xla(dtype):
    inputs, scale = draw((2, 3, 70), dtype)
    epsilon = jnp.float32(1e-5)
    slopes = jax.grad(lambda x, s: jnp.sum(jnp.sin(norm(x, s))), (0, 1))(inputs, scale)
    xlas = jax.grad(lambda x, s: jnp.sum(jnp.sin(rms_norm.__wrapped__(x, s, epsilon))), (0, 1))
    for ours, theirs in zip(slopes, xlas(inputs, scale), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, atol=1e-5)

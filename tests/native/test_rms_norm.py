"""Norms in C++: those of XLA to rounding, and a row's result is its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models.layers import RMSNorm, _rms_norm

pytestmark = pytest.mark.usefixtures("library")

SHAPES = [(1, 1, 576), (2, 9, 70), (1, 300, 2048), (3, 2, 5)]


def norm(inputs, scale):
    return RMSNorm(1e-5).apply({"params": {"scale": scale}}, inputs)


def draw(shape):
    rng = np.random.default_rng(0)
    return jnp.asarray(3 * rng.normal(size=shape), jnp.float32), jnp.asarray(
        rng.uniform(0.5, 2, shape[-1]), jnp.bfloat16
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_they_are_those_of_float64(shape):
    """Guards the rest behind the last whole step."""
    inputs, scale = draw(shape)
    assert "jspec_rms_norm" in jax.jit(norm).lower(inputs, scale).as_text()
    wide = np.asarray(inputs, np.float64)
    exact = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    exact *= np.asarray(scale, np.float64)
    np.testing.assert_allclose(jax.jit(norm)(inputs, scale), exact, rtol=1e-6)


def test_a_rows_result_does_not_depend_on_its_neighbours():
    """XLA's does, from eight rows on."""
    inputs, scale = draw((1, 40, 576))
    together = np.asarray(jax.jit(norm)(inputs, scale))
    for count in (1, 2, 7, 8, 9, 33):
        some = jax.jit(norm)(inputs[:, :count], scale)
        np.testing.assert_array_equal(some, together[:, :count])
    batched = jax.jit(norm)(inputs.reshape(8, 5, 576), scale)
    np.testing.assert_array_equal(batched.reshape(1, 40, 576), together)


def test_derivatives_are_those_of_xla():
    inputs, scale = draw((2, 3, 70))
    epsilon = jnp.float32(1e-5)
    scale = scale.astype("float32")
    own = jax.grad(lambda x, s: jnp.sum(jnp.sin(norm(x, s))), (0, 1))(inputs, scale)
    xlas = jax.grad(lambda x, s: jnp.sum(jnp.sin(_rms_norm(x, s, epsilon))), (0, 1))
    for ours, theirs in zip(own, xlas(inputs, scale), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)

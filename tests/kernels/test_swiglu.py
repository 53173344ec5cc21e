"""The gate in C++: that of float64 to rounding, and a number's result does not depend on others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.kernels import swiglu

pytestmark = pytest.mark.usefixtures("library")


def draw(shape):
    return jnp.asarray(6 * np.random.default_rng(0).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("shape", [(1, 1, 2, 1536), (2, 9, 2, 70), (1, 300, 2, 2048), (3, 2, 2, 5)])
def test_it_is_that_of_float64(shape):
    """Guards the rest behind the last whole vector."""
    gate_up = draw(shape)
    assert "jspec_swiglu" in jax.jit(swiglu).lower(gate_up).as_text()
    gate, up = np.moveaxis(np.asarray(gate_up, np.float64), 2, 0)
    np.testing.assert_allclose(jax.jit(swiglu)(gate_up), gate / (1 + np.exp(-gate)) * up, rtol=1e-6)


def test_it_holds_for_all_gates():
    """Guards the powers of two at both ends, and what is no number."""
    gate = np.linspace(-86.5, 100, 100_003, dtype=np.float32)
    gated = swiglu(jnp.stack([gate, np.ones_like(gate)])[None, None])[0, 0]
    wide = gate.astype(np.float64)
    np.testing.assert_allclose(gated, wide / (1 + np.exp(-wide)), rtol=4e-7)
    odd = np.array([0.0, -0.0, -88.0, -1e30, 1e30, np.inf, -np.inf, np.nan], np.float32)
    gated = np.asarray(swiglu(jnp.stack([odd, np.ones_like(odd)])[None, None])[0, 0])
    np.testing.assert_array_equal(gated[:4], 0)
    np.testing.assert_array_equal(gated[4:6], odd[4:6])
    assert np.isnan(gated[6:]).all()


def test_a_rows_result_does_not_depend_on_its_neighbours():
    gate_up = draw((1, 40, 2, 70))
    together = np.asarray(jax.jit(swiglu)(gate_up))
    for count in (1, 2, 7, 33):
        some = jax.jit(swiglu)(gate_up[:, :count])
        np.testing.assert_array_equal(some, together[:, :count])
    batched = jax.jit(swiglu)(gate_up.reshape(8, 5, 2, 70))
    np.testing.assert_array_equal(batched.reshape(1, 40, 70), together)


def test_derivatives_are_those_of_xla():
    gate_up = draw((2, 3, 2, 20))
    slopes = jax.grad(lambda x: jnp.sum(jnp.sin(swiglu(x))))(gate_up)
    xlas = jax.grad(lambda x: jnp.sum(jnp.sin(swiglu.__wrapped__(x))))(gate_up)
    np.testing.assert_allclose(slopes, xlas, atol=1e-5)

"""Rows of a table in C++: those of XLA, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models.layers import _look_up, look_up

pytestmark = pytest.mark.usefixtures("library")


def table(shape, dtype):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("width", [1, 70, 576])
def test_they_are_those_of_xla(width, dtype):
    """Ids below 0 count from the end, and those out of range are the nearest, as JAX has it."""
    ids = jnp.asarray([[0, 49, 7], [-1, -50, 7], [50, 1000, -51]], jnp.int32)
    rows = table((50, width), dtype)
    assert "jspec_look_up" in jax.jit(look_up).lower(rows, ids).as_text()
    own = jax.jit(look_up)(rows, ids)
    assert own.dtype == jnp.float32
    np.testing.assert_array_equal(own.reshape(-1, width), _look_up(rows, ids.reshape(-1)))


def test_many_rows_are_shared_out():
    rows = table((300, 576), "bfloat16")
    ids = jnp.asarray(np.random.default_rng(1).integers(0, 300, [2, 400]), jnp.int32)
    np.testing.assert_array_equal(look_up(rows, ids), np.asarray(rows, np.float32)[ids])


def test_derivatives_are_those_of_xla():
    """A row that is looked up twice has the sum of both."""
    rows, ids = table((5, 8), "float32"), jnp.asarray([[3, 3, 1]], jnp.int32)
    slope = jax.grad(lambda rows: jnp.sum(look_up(rows, ids)))(rows)
    np.testing.assert_array_equal(slope[:, 0], [0, 1, 0, 2, 0])

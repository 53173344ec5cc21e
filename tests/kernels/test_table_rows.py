"""Rows of a table by C++: what JAX's own indexing gives, also for ids that the table has not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.kernels import table_rows

pytestmark = pytest.mark.usefixtures("library")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_those_of_jax(dtype):
    table = jnp.asarray(np.random.default_rng(0).normal(size=(50, 33)), dtype)
    ids = jnp.array([[0, 49, 7], [-1, 50, -60]], jnp.int32)
    program = jax.jit(table_rows)
    assert "jspec_table_rows" in program.lower(table, ids).as_text()
    np.testing.assert_array_equal(program(table, ids), table[ids])
    assert program(table, ids[:, :0]).shape == (2, 0, 33)


def test_a_gradient_is_that_of_jax():
    """Training reads embeddings, too: a row that is asked for twice gets both parts."""
    table = jnp.ones([5, 3])
    ids = jnp.array([[1, 1, 4]], jnp.int32)
    gradient = jax.grad(lambda table: table_rows(table, ids).sum())(table)
    np.testing.assert_array_equal(gradient[:, 0], [0, 2, 0, 0, 1])

"""The largest number in C++: the place and the value that XLA finds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.sampling import _first_argmax, first_argmax

pytestmark = pytest.mark.usefixtures("library")


def check(values):
    index, largest = jax.jit(first_argmax)(values)
    expected = _first_argmax(values.reshape(-1, values.shape[-1]))
    np.testing.assert_array_equal(index.reshape(-1), expected[0])
    np.testing.assert_array_equal(largest.reshape(-1), expected[1])
    assert index.shape == largest.shape == values.shape[:-1]


@pytest.mark.parametrize("shape", [(1, 1, 49152), (2, 3, 1000), (37, 70), (5, 3), (1,), (0, 9)])
def test_it_is_the_first_of_the_largest(shape):
    """Numbers are rounded: many are the largest of their row."""
    values = jnp.asarray(np.random.default_rng(0).normal(size=shape).round(1), jnp.float32)
    assert "jspec_first_argmax" in jax.jit(first_argmax).lower(values).as_text()
    check(values)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1, 63, 64, 99, 129])
def test_what_is_no_number_is_found(odd, place):
    values = np.random.default_rng(0).normal(size=(3, 130)).astype(np.float32)
    values[1, place] = odd
    check(jnp.asarray(values))


def test_rows_of_equals():
    for number in (-np.inf, np.inf, 0.0, -1.0):
        check(jnp.full([2, 200], number, jnp.float32))

"""The largest number in C++, and by XLA for a GPU: what XLA finds on CPU."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.kernels import first_argmax, vocabulary

pytestmark = pytest.mark.usefixtures("library")


def check(values):
    index, largest = jax.jit(first_argmax)(values)
    rows = values.reshape(-1, values.shape[-1])
    expected = first_argmax.__wrapped__(rows)
    with mock.patch.object(vocabulary, "prefers_unrolled_loops", return_value=True):
        on_gpu = first_argmax.__wrapped__(rows)
    for found in ((index.reshape(-1), largest.reshape(-1)), on_gpu):
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])
    assert index.shape == largest.shape == values.shape[:-1]


@pytest.mark.parametrize("shape", [(1, 1, 49152), (2, 3, 1000), (37, 70), (5, 3), (1,), (0, 9)])
def test_it_is_the_first_of_the_largest(shape):
    values = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    assert "jspec_first_argmax" in jax.jit(first_argmax).lower(values).as_text()
    check(values)


@pytest.mark.parametrize("shape", [(40, 3000), (3, 70), (1, 9000)])
def test_of_several_it_is_the_first(shape):
    """Four numbers only: one in four is the largest of its row. Rows enough for all threads."""
    check(jnp.asarray(np.random.default_rng(0).integers(0, 4, size=shape), jnp.float32))


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 9.0])
@pytest.mark.parametrize(
    ("width", "place"),
    [
        *((130, place) for place in (0, 1, 63, 64, 99, 129)),
        *((3000, place) for place in (0, 1023, 1024, 2047, 2048, 2999)),
    ],
)
def test_one_that_stands_out_is_found(odd, width, place):
    """At the edges of vectors and of the blocks that are searched one after another."""
    values = np.random.default_rng(0).normal(size=(3, width)).astype(np.float32)
    values[1, place] = odd
    check(jnp.asarray(values))


@pytest.mark.parametrize("width", [200, 3000])
@pytest.mark.parametrize("number", [-np.inf, np.inf, 0.0, -1.0])
def test_rows_of_equals(width, number):
    check(jnp.full([2, width], number, jnp.float32))


@pytest.mark.parametrize("place", [0, 5, 1999, 2999])
def test_without_the_library_no_number_is_overlooked(place):
    """XLA's own maximum is, on CPU."""
    values = np.random.default_rng(0).normal(size=(3, 3000)).astype(np.float32)
    values[1, place] = np.nan
    index, largest = jax.jit(first_argmax.__wrapped__)(jnp.asarray(values))
    assert index.tolist() == [values[0].argmax(), 3000, values[2].argmax()]
    assert np.isnan(largest).tolist() == [False, True, False]

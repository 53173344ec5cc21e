"""The largest number in C++, and by XLA for a GPU: what XLA finds on CPU."""

import itertools
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


@pytest.mark.parametrize(
    ("width", "places"),
    [(130, (0, 1, 63, 64, 99, 129)), (3000, (0, 1023, 1024, 2047, 2048, 2999))],
)
def test_one_that_stands_out_is_found(width, places):
    """At the edges of vectors and of the blocks that are searched one after another."""
    cases = list(itertools.product([np.nan, np.inf, -np.inf, 9.0], places))
    values = np.random.default_rng(0).normal(size=(len(cases), width)).astype(np.float32)
    for row, (odd, place) in enumerate(cases):
        values[row, place] = odd
    check(jnp.asarray(values))


@pytest.mark.parametrize("width", [200, 3000])
def test_rows_of_equals(width):
    check(jnp.tile(jnp.float32([-np.inf, np.inf, 0.0, -1.0])[:, None], [1, width]))


def test_without_the_library_no_number_is_overlooked():
    """XLA's own maximum is, on CPU."""
    values = np.random.default_rng(0).normal(size=(6, 3000)).astype(np.float32)
    for row, place in enumerate([0, 5, 1999, 2999], 1):
        values[row, place] = np.nan
    index, largest = jax.jit(first_argmax.__wrapped__)(jnp.asarray(values))
    assert index.tolist() == [values[0].argmax(), *[3000] * 4, values[5].argmax()]
    assert np.isnan(largest).tolist() == [False, *[True] * 4, False]

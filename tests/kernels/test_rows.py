"""A kernel of some rows: the same numbers, in every format."""

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.kernels import QuantizedKernel, product, take_rows
from jspec.weights.quantize import quantize
from tests.kernels.test_packed import NUM_INPUTS, NUM_OUTPUTS, make_kernel, packed, random_rows

ROWS = np.array([0, 1, 2, 5, 40, 62])


def draw(shape, seed, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def check(kernel, few, rows):
    """Checks that a kernel of some rows gives the same numbers, bit for bit."""
    assert few.shape == (len(rows), kernel.shape[1])
    assert type(few) is type(kernel)
    inputs = draw((3, kernel.shape[1]), 2)
    np.testing.assert_array_equal(product(inputs, few), product(inputs, kernel)[:, rows])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
def test_products_with_some_rows_are_those_of_all(kind):
    """Bit for bit: a head over few tokens gives the logits of the whole head."""
    kernel = draw((63, 96), 1, "float32" if kind.startswith("int") else kind)
    if kind.startswith("int"):
        kernel = quantize(kernel, ("down",), kind, "float32")
    few = take_rows(kernel, ROWS)
    check(kernel, few, ROWS)
    if isinstance(kernel, QuantizedKernel):
        assert few.values.size < kernel.values.size / 10, "no copy of the whole"


@pytest.mark.parametrize("kind", ["q6_k", "q8_0"])
def test_packed_rows_are_packed_anew(kind):
    """Bit for bit, too; the rows come from all strips, and leave the last one half empty."""
    blocks, _ = random_rows(kind)
    kernel = make_kernel(blocks, kind, (NUM_OUTPUTS, NUM_INPUTS), "bfloat16")
    rows = np.array([0, 3, 15, 16, 17, 31, *range(33, 48), 49])
    few = take_rows(kernel, rows)
    np.testing.assert_array_equal(few.strips, packed(blocks[rows], kind))
    check(kernel, few, rows)

"""A kernel of some rows: the same numbers, in every format."""

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.kernels import QuantizedKernel, product, take_rows
from jspec.weights.quantize import quantize

ROWS = np.array([0, 1, 2, 5, 40, 62])


def draw(shape, seed, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
def test_products_with_some_rows_are_those_of_all(kind):
    """Bit for bit: a head over few tokens gives the logits of the whole one."""
    kernel = draw((63, 96), 1, "float32" if kind.startswith("int") else kind)
    if kind.startswith("int"):
        kernel = quantize(kernel, ("down",), kind, "float32")
    few = take_rows(kernel, ROWS)
    assert few.shape == (len(ROWS), 96)
    assert type(few) is type(kernel)
    inputs = draw((3, 96), 2)
    np.testing.assert_array_equal(product(inputs, few), product(inputs, kernel)[:, ROWS])
    if isinstance(kernel, QuantizedKernel):
        assert few.values.size < kernel.values.size / 10, "no copy of the whole"

"""Zeros where they are read, and no work where they are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.kernels import zeros_if
from jspec.kernels.library import is_available


@pytest.mark.parametrize("is_read", [True, jnp.array(True)])
def test_what_is_read_is_zero(is_read):
    numbers = jax.jit(lambda: zeros_if(is_read, 3, 5))()
    np.testing.assert_array_equal(numbers, np.zeros([3, 5], np.float32))


def test_what_is_not_read_is_not_written():
    program = jax.jit(lambda is_read: zeros_if(is_read, 7, 4096)[:2].at[0, 0].set(1.0))
    if is_available():
        assert "jspec_unwritten" in program.lower(True).as_text()
    numbers = program(jnp.array(False))
    assert numbers.shape == (2, 4096)
    assert numbers[0, 0] == 1
    assert not np.asarray(program(jnp.array(True)))[1].any()

"""Work shared out to a team of threads: nothing is lost or done twice, whoever else is at work."""

import concurrent.futures

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models.layers import linear

pytestmark = pytest.mark.usefixtures("library")

NUM_CALLERS, NUM_CALLS = 4, 40


def draw(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_products_at_the_same_time_are_those_one_after_the_other():
    """The team helps one caller at a time; the others do their work alone, and all of it."""
    kernels = [draw((outputs, 576), outputs) for outputs in (960, 577, 3072, 1001)]
    rows = draw((1, 3, 576), 0)
    alone = [np.asarray(linear(rows, kernel)) for kernel in kernels]

    def call(caller):
        return [
            np.array_equal(linear(rows, kernels[number % 4]), alone[number % 4])
            for number in range(caller, caller + NUM_CALLS)
        ]

    with concurrent.futures.ThreadPoolExecutor(NUM_CALLERS) as pool:
        equal = [one for own in pool.map(call, range(NUM_CALLERS)) for one in own]
    assert len(equal) == NUM_CALLERS * NUM_CALLS
    assert all(equal)

"""One draft: the short way of temperature 0 and the distribution's give the same, and what is no
draft.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.chain import Drawing, draw_from_distribution, draw_one
from jspec.sampling.settings import SamplingSettings
from tests.speculation.drive import QUICK

ROWS, WIDTH, SIZE, FULL = 5, 3, 37, 50
IDS = jnp.asarray(np.random.default_rng(2).permutation(FULL)[:SIZE], jnp.int32).sort()


def logits():
    """Returns rows with a tie, without a distribution, with NaN, and two of which one is unsure."""
    drawn = np.random.default_rng(0).normal(size=(ROWS, SIZE)).astype(np.float32)
    drawn[0, [7, 20]] = 9.0
    drawn[1] = -np.inf
    drawn[2, 5] = np.nan
    drawn[3, 11] = 6.0
    return jnp.asarray(drawn)


@functools.cache
def drawer(has_ids, min_confidence):
    """Returns (temperatures, going, index) -> what is drawn; the temperature is data."""
    drawing = Drawing(FULL, IDS if has_ids else None, min_confidence, draw_from_distribution)
    ones, zeros = jnp.ones([ROWS]), jnp.zeros([ROWS])

    @functools.partial(jax.jit, compiler_options=QUICK)
    def call(temperature, is_going, index):
        settings = SamplingSettings(temperature, zeros.astype(jnp.int32), ones, zeros)
        keys = jax.random.split(jax.random.key(3), (ROWS, WIDTH))
        distributions = jnp.zeros([ROWS, WIDTH, FULL])
        return draw_one(drawing, logits(), settings, keys, index, is_going, distributions)

    return call


@pytest.mark.parametrize("has_ids", [True, False])
@pytest.mark.parametrize("min_confidence", [0.0, 0.5])
def test_a_cold_row_draws_the_same_beside_a_hot_one(has_ids, min_confidence):
    """The last row is cold or hot; the others are what they are without it, distributions
    included.
    """
    call, going = drawer(has_ids, min_confidence), jnp.ones([ROWS], bool)
    cold = jnp.zeros([ROWS])
    alone, beside = (call(t, going, 1) for t in (cold, cold.at[-1].set(1.0)))
    for alone_part, beside_part in zip(alone[1:], beside[1:], strict=True):
        np.testing.assert_array_equal(alone_part[:-1], beside_part[:-1])
    place = int(IDS[7]) if has_ids else 7
    assert alone.token[0] == place, "of equals the first"
    unsure_too = min_confidence == 0
    assert alone.is_meant.tolist() == [unsure_too, False, False, True, unsure_too]
    expected = np.zeros([WIDTH, FULL])
    expected[1, int(IDS[11]) if has_ids else 11] = 1
    np.testing.assert_array_equal(alone.probs[3], expected)
    if has_ids and beside.is_meant[-1]:  # else `coupled` would not be: noise is by the target's ids
        keys = jax.random.split(jax.random.key(3), (ROWS, WIDTH))
        noise = jax.random.gumbel(keys[-1, 1], [FULL], mode="high")
        sums = np.full(FULL, -np.inf)
        sums[IDS] = np.asarray(logits()[-1]) + np.asarray(noise)[IDS]
        assert beside.token[-1] == sums.argmax()
    hot = beside.probs[-1, 1]
    assert float(hot.sum()) == pytest.approx(float(beside.is_meant[-1]))
    assert np.count_nonzero(hot) in (0, SIZE)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_want_none_have_no_distribution(temperature):
    """A cascade adds distributions up, and relies on it."""
    going = jnp.asarray([True, True, True, False, True])
    drawn = drawer(True, 0.0)(jnp.full([ROWS], temperature), going, 0)
    assert drawn.is_meant.tolist() == [True, False, False, False, True]
    totals = np.asarray(drawn.probs.sum(axis=2))
    np.testing.assert_allclose(totals[:, 0], [1, 0, 0, 0, 1], atol=1e-6)
    assert not totals[:, 1:].any()

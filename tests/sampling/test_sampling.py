"""From logits to the distribution that is sampled from, against transformers' own processors."""

import functools

import hypothesis
import hypothesis.extra.numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jspec.sampling.distribution import sample, sampling_probs
from jspec.sampling.settings import SamplingSettings, Switches
from tests.sampling.test_properties import VOCAB, oracle

ALL = Switches(top_k=True, top_p=True, min_p=True)


def make_settings(rows, switches=ALL):
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return SamplingSettings(
        temperature=jnp.asarray(temperature, jnp.float32),
        top_k=jnp.asarray(top_k, jnp.int32),
        top_p=jnp.asarray(top_p, jnp.float32),
        min_p=jnp.asarray(min_p, jnp.float32),
        switches=switches,
    )


probs_of = jax.jit(sampling_probs)


def expected_probs(logits, temperature, top_k, top_p, min_p):
    """Returns what transformers' own processors give for one position."""
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    return oracle(logits, [], [], options)


ROWS = [
    (1.0, 0, 1.0, 0.0),
    (0.3, 0, 1.0, 0.0),
    (2.5, 4, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 99, 1.0, 0.0),  # top_k beyond the vocabulary
    (1.3, 0, 0.7, 0.0),
    (0.9, 0, 1e-6, 0.0),
    (1.0, 0, 1.0, 0.2),
    (1.0, 0, 1.0, 1.0),
    (0.8, 9, 0.9, 0.05),
    (1.7, 3, 0.95, 0.3),
    (1.0, 5, 0.5, 0.01),
]


@pytest.mark.parametrize("scale", [0.5, 3.0, 20.0])
def test_distribution_equals_transformers_row_by_row(scale):
    """Every row with its own settings, several at once, in transformers' order."""
    logits = scale * np.random.default_rng(0).normal(size=(len(ROWS), 6, VOCAB))
    logits = logits.astype(np.float32)
    probs = np.asarray(probs_of(jnp.asarray(logits), make_settings(ROWS)))
    for row, settings in enumerate(ROWS):
        for t in range(6):
            expected = expected_probs(logits[row, t], *settings)
            np.testing.assert_allclose(probs[row, t], expected, atol=2e-6, err_msg=str(settings))
            real = expected > 1e-30  # below, float32 may flush to 0
            assert (probs[row, t][real] > 0).all(), settings
            assert (probs[row, t][expected == 0] == 0).all(), settings


@hypothesis.settings(deadline=None, max_examples=100, derandomize=True)
@hypothesis.given(
    # Multiples of 1/8 far apart or equal: no token within rounding of a threshold by accident.
    logits=hypothesis.extra.numpy.arrays(np.int32, (VOCAB,), elements=st.integers(-40, 40)),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, VOCAB + 3),
    min_p=st.sampled_from([0.0, 0.03, 0.4]),
)
def test_top_k_and_min_p_equal_transformers_with_ties(logits, temperature, top_k, min_p):
    """Ties with the last token kept are kept, as transformers keeps them."""
    logits = (logits / 8).astype(np.float32)
    settings = make_settings([(temperature, top_k, 1.0, min_p)])
    probs = np.asarray(probs_of(jnp.asarray(logits)[None, None], settings))[0, 0]
    expected = expected_probs(logits, temperature, top_k, 1.0, min_p)
    np.testing.assert_allclose(probs, expected, atol=2e-6)


@hypothesis.settings(deadline=None, max_examples=100, derandomize=True)
@hypothesis.given(
    logits=hypothesis.extra.numpy.arrays(
        np.float32, (VOCAB,), elements=st.floats(-30, 30, width=32, allow_subnormal=False)
    ),
    top_p=st.floats(2.0**-20, 1.0, width=32),
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(logits, top_p):
    """Defined without sorting: what is kept reaches top_p, and without its least likely it fails.

    Ties at the edge are all kept, so "without the least likely" drops every one of them.
    """
    row, logits = logits, jnp.asarray(logits)[None, None]
    plain = np.asarray(probs_of(logits, make_settings([(1.0, 0, 1.0, 0.0)])))[0, 0]
    kept = np.asarray(probs_of(logits, make_settings([(1.0, 0, top_p, 0.0)])))[0, 0] > 0
    assert kept.any()
    assert plain[kept].sum() >= top_p - 1e-6
    if not kept.all():
        assert row[kept].min() > row[~kept].max()
    # Where tokens are so unlikely that float32 gives them 0, there is nothing to leave out.
    least = plain[kept & (plain > 0)].min()
    assert plain[plain > least].sum() < top_p + 1e-6


def test_ties_are_kept():
    """Of equally likely tokens none is preferred to another."""
    logits = jnp.array([[[3.0, 1.0, 1.0, 1.0, 0.0]]])
    for settings in [(1.0, 2, 1.0, 0.0), (1.0, 0, 0.75, 0.0)]:
        probs = probs_of(logits, make_settings([settings]))
        assert (probs > 0).tolist() == [[[True, True, True, True, False]]]


def test_temperature_zero_is_one_hot_whatever_the_filters():
    """Greedy rows lie beside sampled ones in one batch; the first of equal maxima is taken."""
    logits = jnp.array([[[1.0, 5.0, 5.0, 2.0]]] * 3)
    rows = [(0.0, 0, 1.0, 0.0), (0.0, 3, 0.1, 0.9), (1.0, 0, 1.0, 0.0)]
    probs = probs_of(logits, make_settings(rows))
    assert probs[:2, 0].tolist() == [[0, 1, 0, 0]] * 2
    assert (probs[2] > 0).all()
    alone = probs_of(logits[:2], make_settings(rows[:2]))
    np.testing.assert_array_equal(alone, probs[:2])


@pytest.mark.parametrize("switches", [Switches(), ALL], ids=str)
def test_neutral_values_change_nothing(switches):
    """A filter that is compiled in for one row must be silent in the others."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, VOCAB)) * 9, jnp.float32)
    probs = probs_of(logits, make_settings([(1.3, 0, 1.0, 0.0)] * 2, switches))
    np.testing.assert_allclose(probs, jax.nn.softmax(logits / 1.3), rtol=1e-5)


def test_masked_tokens_stay_masked():
    """Padding of the vocabulary is masked by -inf; no filter may raise it."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(len(ROWS), 1, VOCAB)), jnp.float32)
    logits = logits.at[:, :, -3:].set(-jnp.inf)
    probs = np.asarray(probs_of(logits, make_settings(ROWS)))
    assert (probs[:, :, -3:] == 0).all()
    np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-5)


def test_sample_never_draws_a_token_of_probability_zero():
    """Even where the noise of such a token is as high as float32 allows."""
    probs = jnp.array([0.0, 0.3, 0.0, 0.7])
    gumbel = jnp.array([3e38, -80.0, 3e38, -80.0])
    assert int(sample(probs, gumbel)) == 3
    assert int(sample(probs, gumbel.at[1].set(-70.0))) == 1


def test_sample_follows_the_distribution(new_key):
    """Chi-square, N = 20,000, 4 degrees of freedom; a false alarm has odds of 1e-6 (fixed key)."""
    probs = jnp.array([0.05, 0.4, 0.0, 0.25, 0.1, 0.2])
    noise = jax.random.gumbel(new_key(), (20_000, 6))
    draw = jax.jit(functools.partial(sample, jnp.broadcast_to(probs, noise.shape)))
    counts = np.bincount(np.asarray(draw(noise)), minlength=6)
    expected = 20_000 * np.asarray(probs)
    real = expected > 0
    assert counts[~real].sum() == 0
    assert np.sum((counts - expected)[real] ** 2 / expected[real]) < 33.4

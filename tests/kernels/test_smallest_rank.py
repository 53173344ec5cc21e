"""Thresholds in C++: those of a sorted vocabulary, and of the bisection that XLA does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.kernels import smallest_rank, vocabulary
from jspec.sampling.distribution import _rank

pytestmark = pytest.mark.usefixtures("library")

LARGEST = np.iinfo(np.int32).max


def by_sorting(rank, weights, target):
    total, order = 0.0, np.argsort(rank, kind="stable")
    for place in order:
        total += float(weights[place])
        if total >= target:
            return rank[place]
    return LARGEST


def draw(shape, scale):
    """Returns ranks, and distributions; a third of the logits are ties, and a few are masked."""
    rng = np.random.default_rng(0)
    logits = scale * rng.normal(size=shape)
    logits[..., ::3] = np.round(logits[..., ::3])
    logits[..., 5::40] = -np.inf
    logits = jnp.asarray(logits, jnp.float32)
    return _rank(logits), jax.nn.softmax(logits)


@pytest.mark.parametrize("scale", [0.01, 50.0])
def test_thresholds_are_those_of_sorting(scale):
    """Float64 sums over whole rows, up to the very first weight and beyond the last."""
    rank, probs = draw((2, 5, 3000), scale)
    targets = jnp.tile(jnp.float32([1e-37, 0.1, 0.5, 0.9, 0.999])[None, :, None], [2, 1, 1])
    function = jax.jit(smallest_rank)
    assert "jspec_smallest_rank" in function.lower(rank, probs, targets).as_text()
    got = np.asarray(function(rank, probs, targets))
    for row in np.ndindex(2, 5):
        parts = (np.asarray(one[row]) for one in (rank, probs, targets))
        assert got[row].item() == by_sorting(*parts), row


@pytest.mark.parametrize("is_gpu", [False, True])
def test_counts_are_those_of_xla(is_gpu, monkeypatch):
    """Exact on both sides, ties and targets that nothing reaches included."""
    monkeypatch.setattr(vocabulary, "prefers_unrolled_loops", lambda: is_gpu)
    rank = jnp.tile(draw((1, 3, 3000), 3.0)[0], [7, 1, 1])
    targets = jnp.float32([0, 1, 2, 50, 2999, 3000, 3001])[:, None, None]
    operands = rank, jnp.ones_like(rank, jnp.float32), targets
    np.testing.assert_array_equal(smallest_rank(*operands), smallest_rank.__wrapped__(*operands))


@pytest.mark.parametrize("is_gpu", [False, True])
def test_xla_finds_the_thresholds_of_sorting(is_gpu, monkeypatch):
    """Guards against a digit too many or too few, and signs in the wrong order."""
    monkeypatch.setattr(vocabulary, "prefers_unrolled_loops", lambda: is_gpu)
    rank, probs = draw((2, 4, 300), 3.0)
    rank = rank.at[0].set(-rank[0])
    weights = jnp.round(probs * 2**16) / 2**16  # whose sums are exact
    targets = jnp.tile(jnp.float32([2**-16, 0.25, 0.75, 2.0])[None, :, None], [2, 1, 1])
    got = np.asarray(jax.jit(smallest_rank.__wrapped__)(rank, weights, targets))
    for row in np.ndindex(2, 4):
        parts = (np.asarray(one[row]) for one in (rank, weights, targets))
        assert got[row].item() == by_sorting(*parts), row


def test_what_is_enough_together_is_enough_in_parts():
    """Float64 sums of a few bits' ranks at a time miss by rounding what the sum of all reaches."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        rank = jnp.asarray(rng.integers(-(2**31), 2**31, 60), jnp.int32)[None, None]
        weights = jnp.asarray(10.0 ** rng.uniform(-30, 0, 60), jnp.float32)[None, None]
        total = jnp.float32(np.asarray(weights, np.float64).sum())
        got = smallest_rank(rank, weights, jnp.full([1, 1, 1], total)).item()
        if got == LARGEST:  # rounding to float32 may have made the total more than all
            assert np.asarray(weights, np.float64).sum() < float(total)
        else:
            assert got in np.asarray(rank)


def test_nothing_is_enough_where_a_weight_is_no_number():
    rank, probs = draw((1, 2, 300), 3.0)
    probs = probs.at[0, 0, 7].set(jnp.nan)
    got = smallest_rank(rank, probs, jnp.full([1, 2, 1], 0.99))
    assert got[0, 0, 0] == LARGEST
    assert got[0, 1, 0] < LARGEST


def test_a_rows_threshold_does_not_depend_on_its_neighbours():
    """The distribution of a draft, found alone, is that of the target's, found beside others."""
    rank, probs = draw((4, 6, 3000), 3.0)
    target = jnp.full([4, 6, 1], 0.9)
    together = np.asarray(smallest_rank(rank, probs, target))
    for b, t in np.ndindex(4, 6):
        place = slice(b, b + 1), slice(t, t + 1)
        alone = smallest_rank(rank[place], probs[place], target[place])
        np.testing.assert_array_equal(alone, together[place])

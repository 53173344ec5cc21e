"""Block verification: known values, what it gains, and what it needs of its noise."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.sampling.distribution import sample
from jspec.sampling.noise import AcceptanceNoise
from jspec.speculation.acceptance import block, get_rule
from jspec.speculation.types import Verdict
from tests.speculation.enumeration import (
    all_counts,
    enumerate_paths,
    expected_accepted,
    kept_probs,
    random_distributions,
)

BLOCK, REJECTION = get_rule("block"), get_rule("rejection")
ALMOST_ONE = np.float32(1 - 2**-24)


def random_paths(seed, vocab, width, kind="sampled", **options):
    rng = np.random.default_rng(seed)
    target, draft = (random_distributions(rng, (vocab,) * 3, zeros=0.2) for _ in range(2))
    return enumerate_paths(target, draft, width, kind, **options)


@pytest.mark.parametrize(
    ("rule", "expected"), [(REJECTION, 10 / 9), (BLOCK, 11 / 9)], ids=["rejection", "block"]
)
def test_the_papers_example(rule, expected):
    """Two letters, target (1/3, 2/3), draft (2/3, 1/3), two drafts: 11/9 kept in place of 10/9.

    Guards against a rule that is lossless but gains nothing.
    """
    target, draft = (
        np.broadcast_to(distribution, (2, 2, 2))
        for distribution in ([1 / 3, 2 / 3], [2 / 3, 1 / 3])
    )
    accepted = expected_accepted(rule, enumerate_paths(target, draft, 2))
    np.testing.assert_allclose(accepted, expected, atol=1e-6)


@pytest.mark.parametrize("width", [1, 3])
def test_block_keeps_at_least_as_many_as_rejection(width):
    """Guards against a lossless rule that keeps fewer: in each of 128 random contexts."""
    gains = []
    for seed in range(8):
        paths = random_paths(seed, 4, width)
        gains.append(expected_accepted(BLOCK, paths) - expected_accepted(REJECTION, paths))
    gains = np.concatenate(gains)
    assert gains.min() > -1e-6
    if width == 1:
        assert gains.max() < 1e-6  # the same rule
    else:
        assert (gains > 1e-3).mean() > 0.5


@pytest.mark.parametrize("counts_of", [lambda _, width: width, all_counts], ids=["full", "fewer"])
def test_each_prefix_is_kept_with_its_weight(counts_of):
    """P(at least i kept | the first i drafts) = p_i: the theorem that makes the rule lossless."""
    paths = random_paths(4, 4, 3, counts_of=counts_of)
    at_least = np.cumsum(kept_probs(BLOCK, paths)[:, ::-1], axis=1)[:, ::-1]
    weights = np.asarray(
        jax.jit(block.prefix_weights)(paths.target_probs, paths.proposal), np.float64
    )
    counts = np.asarray(paths.proposal.num_tokens)
    for i in range(1, 4):
        prefix = np.unique(paths.chains[:, : 2 + i], axis=0, return_inverse=True)[1].reshape(-1)
        is_real = counts >= i
        kept = np.bincount(prefix, paths.weights * at_least[:, i])
        expected = np.bincount(prefix, paths.weights * weights[:, i] * is_real)
        np.testing.assert_allclose(kept, expected, atol=1e-6)


def accept(rule, paths, uniforms):
    rows, vocab = len(paths.index), paths.target_probs.shape[-1]
    uniforms = jnp.broadcast_to(jnp.asarray(uniforms, jnp.float32), (rows, len(uniforms)))
    noise = AcceptanceNoise(uniforms, jnp.zeros([rows, vocab]))
    return rule(paths.target_probs, paths.proposal, noise)


accept_block = jax.jit(BLOCK.accept)


def test_acceptance_agrees_with_its_probabilities():
    """Guards against an `accept` that is not what invariant 1 sums over.

    Each prefix passes at u = 0 and fails at u = 1 - 2^-24 unless it is sure: weighed with h, the
    eight patterns give the exact distribution of what `accept` keeps.
    """
    paths = random_paths(6, 3, 3, counts_of=all_counts)
    good = np.asarray(
        jax.jit(block.good_prefix_probs)(paths.target_probs, paths.proposal), np.float64
    )
    distribution = np.zeros((len(paths.index), 4))
    for passes in itertools.product([True, False], repeat=3):
        verdict = accept(accept_block, paths, np.where(passes, 0, ALMOST_ONE))
        weight = np.prod(np.where(passes, good, 1 - good), axis=1)
        distribution[np.arange(len(distribution)), np.asarray(verdict.num_accepted)] += weight
    np.testing.assert_allclose(distribution, kept_probs(BLOCK, paths), atol=1e-6)


def accept_at_most(target_probs, proposal, noise):
    """Takes `<=` for `<`."""
    is_good = noise.uniforms <= block.good_prefix_probs(target_probs, proposal)
    kept = jnp.max(jnp.where(is_good, jnp.arange(1, proposal.width + 1), 0), axis=1)
    distribution = block.next_token_probs(target_probs, proposal, kept)
    return Verdict(kept, sample(distribution, noise.gumbel))


def test_a_prefix_the_target_never_says_is_refused_at_u_zero():
    """`<=` for `<` differs with probability 2^-23: only noise put in by hand sees it."""
    paths = random_paths(7, 4, 3, counts_of=all_counts)
    tokens = np.asarray(paths.proposal.tokens)[..., None]
    said = np.take_along_axis(np.asarray(paths.target_probs)[:, :3], tokens, 2)[..., 0] > 0
    most = np.cumprod(said, axis=1).sum(axis=1)
    most = np.minimum(most, np.asarray(paths.proposal.num_tokens))
    assert (np.asarray(accept(accept_block, paths, [0.0] * 3).num_accepted) <= most).all()
    assert (np.asarray(accept(jax.jit(accept_at_most), paths, [0.0] * 3).num_accepted) > most).any()

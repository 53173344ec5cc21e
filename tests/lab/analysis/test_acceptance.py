"""How often drafts are accepted, in theory."""

import functools

import numpy as np
import pytest
from jax import numpy as jnp

from jspec.lab.experiments.estimates import divergence, expected_acceptance, lenient_outcome
from jspec.speculation.acceptance import lenient, rejection
from jspec.speculation.types import Proposal

VOCAB = 6
LENIENCES = [1.0, 0.2, 0.0]


def random_distributions(seed, shape=(4, 3), zeros=0.25):
    """Returns two sets of distributions; some of their probabilities are 0."""
    rng = np.random.default_rng(seed)
    distributions = rng.dirichlet([0.5] * VOCAB, (2, *shape)) * (
        rng.random((2, *shape, VOCAB)) > zeros
    )
    distributions[..., 0] += 1e-3
    return (distributions / distributions.sum(axis=-1, keepdims=True)).astype(np.float32)


def test_acceptance_and_divergence_are_what_they_are_defined_as():
    """E over drafts x of min(1, target(x) / draft(x)); Thm 3.5 and Cor. 3.6."""
    target, draft = random_distributions(1)
    accepted, far = expected_acceptance(target, draft), divergence(target, draft)
    assert accepted.shape == (4, 3)
    with np.errstate(divide="ignore", invalid="ignore"):
        means = np.nansum(draft * np.minimum(1, target / draft), axis=-1)
    np.testing.assert_allclose(accepted, means, rtol=1e-5)
    np.testing.assert_allclose(far, np.abs(target - draft).sum(axis=-1) / 2, atol=1e-6)
    np.testing.assert_allclose(far, divergence(draft, target), atol=1e-6)
    np.testing.assert_allclose(far, 1 - accepted, atol=1e-6)


def through_the_rule(target, draft, keep_probs, next_probs):
    """Returns acceptance [n] and emitted distribution [n v] of a rule, by going through every
    draft.
    """
    rows = jnp.repeat(target[:, None], VOCAB, axis=0)
    drafts = jnp.tile(jnp.arange(VOCAB, dtype=jnp.int32), len(target))[:, None]
    count = jnp.ones([len(drafts)], jnp.int32)
    proposal = Proposal(drafts, count, jnp.repeat(draft[:, None], VOCAB, axis=0))
    distributions = jnp.concatenate([rows, rows], axis=1)
    kept = np.asarray(keep_probs(distributions, proposal)).reshape(-1, VOCAB)
    instead = np.asarray(next_probs(distributions, proposal, 0 * count)).reshape(-1, VOCAB, VOCAB)
    draft = np.asarray(draft)
    emitted = draft * kept + np.einsum("nd,ndv->nv", draft * (1 - kept), instead)
    return (draft * kept).sum(axis=1), emitted


@pytest.mark.parametrize("lenience", LENIENCES)
def test_lenience_is_that_of_the_rule(lenience):
    """Its own probabilities at every token, summed over all drafts.

    Guards against formulas of another rule than the one that runs, lenient residuals among them.
    """
    keep = functools.partial(rejection.acceptance_probs, lenience=lenience)
    target, draft = (jnp.asarray(p.reshape(-1, VOCAB)) for p in random_distributions(3))
    actual, emitted = map(np.asarray, lenient_outcome(target, draft, lenience, None))
    acceptance, expected = through_the_rule(target, draft, keep, rejection.next_token_probs)
    np.testing.assert_allclose(actual, acceptance, atol=1e-6)
    np.testing.assert_allclose(emitted, expected, atol=1e-6)
    np.testing.assert_allclose(emitted.sum(axis=1), 1, atol=1e-5)
    far = np.asarray(divergence(target, emitted))
    if lenience == 1:
        assert far.max() < 1e-6
    else:
        assert far.mean() > 0.01
        assert (emitted * lenience <= target + 1e-6).all()


@pytest.mark.parametrize("lenience", LENIENCES)
def test_lenience_at_temperature_0_is_that_of_the_rule(lenience):
    """Likewise; a rejected draft becomes the most likely token."""
    keep = functools.partial(lenient.argmax_acceptance_probs, lenience=lenience)
    distribution, draft = (jnp.asarray(p.reshape(-1, VOCAB)) for p in random_distributions(4))
    best = np.eye(VOCAB)[np.asarray(distribution).argmax(axis=1)]
    target = jnp.asarray(best, jnp.float32)
    actual, emitted = lenient_outcome(target, draft, lenience, distribution)
    acceptance, expected = through_the_rule(
        distribution, draft, keep, lambda *_: np.repeat(best, VOCAB, axis=0)
    )
    np.testing.assert_allclose(actual, acceptance, atol=1e-6)
    np.testing.assert_allclose(emitted, expected, atol=1e-6)

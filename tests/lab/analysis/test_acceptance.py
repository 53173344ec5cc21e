"""How often drafts are accepted, in theory."""

import numpy as np
import pytest
from jax import numpy as jnp

from jspec.lab.experiments.estimates import (
    divergence,
    expected_acceptance,
    lenient_acceptance,
    lenient_argmax_accepted,
    lenient_next_token_probs,
)
from jspec.speculation.acceptance import lenient, rejection
from jspec.speculation.types import Proposal

VOCAB = 6
LENIENCES = [1.0, 0.6, 0.2, 0.0]


def random_distributions(seed, shape=(4, 3), zeros=0.25):
    """Returns two sets of distributions; some of their probabilities are 0."""
    rng = np.random.default_rng(seed)
    distributions = rng.dirichlet([0.5] * VOCAB, (2, *shape)) * (
        rng.random((2, *shape, VOCAB)) > zeros
    )
    distributions[..., 0] += 1e-3
    return (distributions / distributions.sum(axis=-1, keepdims=True)).astype(np.float32)


def test_known_distributions():
    """Equal distributions, disjoint ones, half an overlap, and a draft that is always the same
    token.
    """
    target = jnp.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    draft = jnp.array([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.0, 0.5, 0.5], [0.0, 1.0, 0.0]])
    np.testing.assert_allclose(expected_acceptance(target, draft), [1, 0, 0.5, 0.3])
    np.testing.assert_allclose(divergence(target, draft), [0, 1, 0.5, 0.7], atol=1e-7)


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
    """Returns the acceptance and the distribution that a rule gives, by going through every
    draft.
    """
    rows = jnp.repeat(jnp.asarray(target)[None, None], VOCAB, axis=0)
    proposal = Proposal(
        jnp.arange(VOCAB, dtype=jnp.int32)[:, None],
        jnp.ones([VOCAB], jnp.int32),
        jnp.repeat(jnp.asarray(draft)[None, None], VOCAB, axis=0),
    )
    distributions = jnp.concatenate([rows, rows], axis=1)
    kept = np.asarray(keep_probs(distributions, proposal))[:, 0]
    instead = np.asarray(next_probs(distributions, proposal, jnp.zeros([VOCAB], jnp.int32)))
    draft = np.asarray(draft)
    emitted = draft * kept + ((draft * (1 - kept))[:, None] * instead).sum(axis=0)
    return (draft * kept).sum(), emitted


@pytest.mark.parametrize("lenience", LENIENCES)
def test_lenience_is_that_of_the_rule(lenience):
    """Its own probabilities at every token, summed over all drafts.

    Guards against formulas of another rule than the one that runs, lenient residuals among them.
    """

    def keep(distributions, proposal):
        return rejection.acceptance_probs(distributions, proposal, lenience=lenience)

    target, draft = (
        jnp.asarray(distribution.reshape(-1, VOCAB)) for distribution in random_distributions(3)
    )
    actual = lenient_acceptance(target, draft, lenience)
    emitted = np.asarray(lenient_next_token_probs(target, draft, lenience))
    for row in range(len(target)):
        acceptance, distribution = through_the_rule(
            target[row], draft[row], keep, rejection.next_token_probs
        )
        assert actual[row] == pytest.approx(acceptance, abs=1e-6)
        np.testing.assert_allclose(emitted[row], distribution, atol=1e-6)
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

    def keep(distributions, proposal):
        return lenient.argmax_acceptance_probs(distributions, proposal, lenience=lenience)

    distribution, draft = (jnp.asarray(p.reshape(-1, VOCAB)) for p in random_distributions(4))
    kept = np.asarray(lenient_argmax_accepted(distribution, draft, lenience))
    for row in range(len(distribution)):
        best = np.eye(VOCAB)[distribution[row].argmax()]
        acceptance, emitted = through_the_rule(
            distribution[row], draft[row], keep, lambda *args, best=best: np.tile(best, [VOCAB, 1])
        )
        assert kept[row].sum() == pytest.approx(acceptance, abs=1e-6)
        np.testing.assert_allclose(kept[row] + (1 - kept[row].sum()) * best, emitted, atol=1e-6)

"""How often drafts are kept, in theory."""

import numpy as np
import pytest
from jax import numpy as jnp

from jspec.analysis.acceptance import expected_acceptance


def test_known_laws():
    """Equal laws, disjoint ones, half an overlap, and a draft that is always the same token."""
    target = jnp.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    draft = jnp.array([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.0, 0.5, 0.5], [0.0, 1.0, 0.0]])
    np.testing.assert_allclose(expected_acceptance(target, draft), [1, 0, 0.5, 0.3])


def test_it_is_the_mean_of_the_acceptance_probabilities():
    """E over drafts x of min(1, target(x) / draft(x)), and 1 minus the total variation."""
    rng = np.random.default_rng(0)
    target, draft = rng.dirichlet([0.5] * 7, (2, 4, 3)).astype(np.float32)
    found = np.asarray(expected_acceptance(jnp.asarray(target), jnp.asarray(draft)))
    assert found.shape == (4, 3)
    np.testing.assert_allclose(
        found, np.sum(draft * np.minimum(1, target / draft), axis=-1), rtol=1e-5
    )
    assert found == pytest.approx(1 - np.abs(target - draft).sum(axis=-1) / 2, rel=1e-5)

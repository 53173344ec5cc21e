"""Several drafts for one position: exact by enumeration, with and without replacement."""

import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jspec.sampling.distribution import NO_TOKEN
from jspec.speculation.acceptance import siblings
from jspec.speculation.acceptance.tree import tree_of
from jspec.speculation.types import Proposal
from tests.speculation.enumeration import random_distributions, without_earlier

VOCAB = 4
TOLERANCE = 1e-6


def candidate_probs(target, tokens, draft_probs, *, with_replacement=True):
    """Returns what `siblings` says of the children of the root: the probability that each is
    accepted once those before it are refused, and the distribution after all are.
    """
    if draft_probs is not None and not with_replacement:
        draft_probs = without_earlier(tokens, draft_probs)
    proposal = Proposal(
        tokens,
        jnp.full(len(tokens), tokens.shape[1], jnp.int32),
        draft_probs,
        parents=jnp.full_like(tokens, -1),
        max_depth=1,
    )
    return refused_one_by_one(target, proposal)


@jax.jit
def refused_one_by_one(target, proposal):
    """Returns both by one program: operation by operation takes far longer."""
    operands = jnp.pad(target[:, None], ((0, 0), (0, proposal.width), (0, 0))), proposal
    tree, root = tree_of(proposal), jnp.zeros(len(target), jnp.int32)
    last = siblings.RULE.next_token_probs(*operands, tree, root)
    return siblings.acceptance_probs(*operands, tree), last


def draw_weights(draft, tokens, with_replacement):
    """Returns the probability of drawing each row of candidates, in float64.

    Once a distribution without replacement is used up, token 0 is put forward all the same.
    """
    weights = np.ones(len(tokens))
    for row, path in enumerate(tokens):
        left = draft.copy()
        for i, token in enumerate(path):
            is_used_up = left[i].sum() == 0
            weights[row] *= token == 0 if is_used_up else left[i, token] / left[i].sum()
            if not with_replacement:
                left[:, token] = 0
    return weights


def enumerate_candidates(target, draft, with_replacement):
    """Returns every row of candidates, its probability, and target and draft distributions for
    it.
    """
    k = len(draft)
    tokens = np.array(list(itertools.product(range(VOCAB), repeat=k)))
    weights = draw_weights(draft, tokens, with_replacement)
    rows = (
        jnp.asarray(np.broadcast_to(target, (len(tokens), VOCAB)), jnp.float32),
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(np.broadcast_to(draft, (len(tokens), k, VOCAB)), jnp.float32),
    )
    return weights, rows


def emitted_distribution(target, draft, with_replacement):
    """Returns the distribution of the token that comes out, and the probability of keeping a
    candidate.
    """
    weights, rows = enumerate_candidates(target, draft, with_replacement)
    probs = candidate_probs(*rows, with_replacement=with_replacement)
    accept, last = (np.asarray(values, np.float64) for values in probs)
    distribution = np.zeros(VOCAB)
    for i in range(len(draft)):
        np.add.at(distribution, np.asarray(rows[1])[:, i], weights * accept[:, i])
        weights = weights * (1 - accept[:, i])
    return distribution + weights @ last, 1 - weights.sum()


def distribution_pair(seed, k, is_shared):
    """Returns a target distribution and k draft distributions, with exact zeros."""
    rng = np.random.default_rng(seed)
    target = random_distributions(rng, (VOCAB,), 0.7, zeros=0.2)
    draft = random_distributions(rng, (1 if is_shared else k, VOCAB), 0.7, zeros=0.2)
    return target, np.broadcast_to(draft, (k, VOCAB)).copy()


@pytest.mark.parametrize("with_replacement", [True, False], ids=["with", "without"])
@hypothesis.settings(deadline=None, max_examples=15, derandomize=True)
@hypothesis.given(
    seed=st.integers(0, 2**32 - 1), k=st.sampled_from([1, 2, 3, 4]), is_shared=st.booleans()
)
def test_candidates_are_lossless(with_replacement, seed, k, is_shared):
    """Same or different distributions, zeros in them, more draws than a distribution has tokens."""
    target, draft = distribution_pair(seed, k, is_shared)
    distribution, _ = emitted_distribution(target, draft, with_replacement)
    np.testing.assert_allclose(distribution, target, atol=TOLERANCE)


@pytest.mark.parametrize("with_replacement", [True, False], ids=["with", "without"])
def test_one_candidate_is_speculative_sampling(with_replacement):
    """It is kept with the sum of min(target, draft), exactly; more candidates only add to that."""
    target, draft = distribution_pair(1, 4, is_shared=True)
    rates = [emitted_distribution(target, draft[:k], with_replacement)[1] for k in (1, 2, 3, 4)]
    np.testing.assert_allclose(rates[0], np.minimum(target, draft[0]).sum(), atol=TOLERANCE)
    assert (np.diff(rates) > -TOLERANCE).all()
    assert rates[3] > rates[0] + 1e-3


@pytest.mark.parametrize("relation", ["equal", "disjoint"])
@pytest.mark.parametrize("with_replacement", [True, False], ids=["with", "without"])
def test_equal_and_disjoint_distributions(with_replacement, relation):
    """All is kept where the distributions agree, nothing where they share no token; no 0 / 0 in
    either.
    """
    target = np.array([0.25, 0.75, 0.0, 0.0])
    draft = np.array([target if relation == "equal" else target[::-1]] * 2)
    distribution, rate = emitted_distribution(target, draft, with_replacement)
    np.testing.assert_allclose(distribution, target, atol=TOLERANCE)
    np.testing.assert_allclose(rate, 1.0 if relation == "equal" else 0.0, atol=TOLERANCE)


def test_without_replacement_exhausts_the_target():
    """As many candidates as tokens: one of them is always kept (2402.14160's reason to do it)."""
    target, draft = np.array([0.1, 0.2, 0.3, 0.4]), np.array([[0.4, 0.3, 0.2, 0.1]] * 4)
    rates = [emitted_distribution(target, draft, flag)[1] for flag in (True, False)]
    assert rates[0] < 1 - 1e-3
    np.testing.assert_allclose(rates[1], 1, atol=TOLERANCE)


def test_deterministic_candidates_are_lossless():
    """Two tokens for certain: kept with their joint probability, the rest of the distribution
    otherwise.
    """
    target = jnp.array([[0.1, 0.2, 0.3, 0.4]])
    tokens = jnp.array([[3, 1]], jnp.int32)
    accept, distribution = candidate_probs(target, tokens, None)
    np.testing.assert_allclose(accept, [[0.4, 0.2 / 0.6]], rtol=1e-6)
    np.testing.assert_allclose(distribution, [[0.25, 0.0, 0.75, 0.0]], rtol=1e-6)
    repeated, _ = candidate_probs(target, jnp.array([[3, 3]], jnp.int32), None)
    np.testing.assert_allclose(repeated, [[0.4, 0.0]], rtol=1e-6)


@pytest.mark.parametrize("with_replacement", [True, False], ids=["with", "without"])
def test_a_distribution_of_zeros_is_no_candidate(with_replacement):
    """Padding, wherever it stands: never accepted, and it takes nothing away, not its token."""
    target, tokens = jnp.array([[0.5, 0.5]] * 2), jnp.array([[0, 1], [0, 0]], jnp.int32)
    draft = jnp.array([[[1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [1.0, 0.0]]])
    accept, distribution = candidate_probs(target, tokens, draft, with_replacement=with_replacement)
    np.testing.assert_allclose(accept, [[0.5, 0.0], [0.0, 0.5]])
    np.testing.assert_allclose(distribution, [[0.0, 1.0]] * 2)


def test_a_failed_draw_is_no_candidate():
    """NO_TOKEN, which a drafter of NaN gives, must not be read as the vocabulary's last token."""
    target, distribution = jnp.array([[0.5, 0.5]]), jnp.array([[[0.5, 0.5]]])
    tokens = jnp.array([[NO_TOKEN]], jnp.int32)
    assert candidate_probs(target, tokens, distribution)[0].tolist() == [[0.0]]


def test_a_candidate_that_the_target_does_not_lack_is_never_accepted():
    """A rejected token is used up: its residual is exactly 0."""
    target, tokens = jnp.array([[0.5, 0.5, 0.0]]), jnp.array([[2, 0, 0]], jnp.int32)
    draft = jnp.array([[[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]])
    accept, _ = candidate_probs(target, tokens, draft)
    np.testing.assert_array_equal(accept, [[0.0, 0.5, 0.0]])

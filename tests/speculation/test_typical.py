"""Typical acceptance: its threshold, and what it is at temperature 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.sampling.noise import AcceptanceNoise
from jspec.speculation.acceptance import RuleOptions, get_rule
from jspec.speculation.types import Proposal
from tests.speculation.enumeration import acceptance_probs, next_token_probs

ROWS, WIDTH, VOCAB = 300, 3, 6


def typical(epsilon=0.3, delta=0.09):
    return get_rule("typical", RuleOptions(typical_epsilon=epsilon, typical_delta=delta))


def proposal_of(tokens):
    tokens = jnp.asarray(tokens, jnp.int32)
    return Proposal(tokens, jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32))


def random_round(rng):
    """Returns target distributions with zeros, a proposal and noise."""
    target = rng.dirichlet([0.4] * VOCAB, (ROWS, WIDTH + 1))
    target[target < 0.02] = 0
    target = jnp.asarray(target / target.sum(axis=-1, keepdims=True), jnp.float32)
    noise = AcceptanceNoise(
        jnp.asarray(rng.uniform(size=(ROWS, WIDTH)), jnp.float32),
        jnp.asarray(rng.gumbel(size=(ROWS, VOCAB)), jnp.float32),
    )
    return target, proposal_of(rng.integers(0, VOCAB, (ROWS, WIDTH))), noise


@pytest.mark.parametrize(("epsilon", "delta"), [(0.3, 0.09), (0.1, 0.9), (1.0, 1.0)])
def test_the_threshold_is_the_papers(epsilon, delta):
    """min(epsilon, delta · exp(-H)), in nats; guards against NaN from 0 · log 0."""
    target, proposal, _ = random_round(np.random.default_rng(0))
    probs = np.asarray(target, np.float64)[:, :WIDTH]
    entropy = -np.sum(probs * np.log(np.where(probs > 0, probs, 1)), axis=-1)
    threshold = np.minimum(epsilon, delta * np.exp(-entropy))
    of_drafts = np.take_along_axis(probs, np.asarray(proposal.tokens)[..., None], 2)[..., 0]
    clear = np.abs(of_drafts - threshold) > 1e-6
    kept = np.asarray(acceptance_probs(typical(epsilon, delta), target, proposal))
    np.testing.assert_array_equal(kept[clear], (of_drafts > threshold)[clear])
    assert 0 < kept.mean() < 1


def test_just_enough_is_too_little():
    """Strictly above: guards `>=`, and so a token of probability 0 at epsilon 0."""
    target = jnp.array([[[0.25, 0.75, 0.0]] * 2], jnp.float32)
    target = jnp.repeat(target, 3, axis=0)

    def kept(rule):
        return acceptance_probs(rule, target, proposal_of([[0], [1], [2]]))[:, 0].tolist()

    assert kept(typical(0.25, 1.0)) == [0, 1, 0]
    assert kept(typical(np.nextafter(np.float32(0.25), np.float32(0)).item(), 1.0)) == [1, 1, 0]
    assert kept(typical(0.0, 1.0)) == [1, 1, 0]


def test_temperature_zero_is_the_greedy_match():
    """One-hot distributions: token for token what `greedy` says, for every noise and every
    epsilon.
    """
    rng = np.random.default_rng(1)
    target, proposal, noise = random_round(rng)
    target = jax.nn.one_hot(jnp.argmax(target, axis=-1), VOCAB, dtype=jnp.float32)
    likely = jnp.argmax(target[:, :WIDTH], axis=-1).astype(jnp.int32)
    is_likely = jnp.asarray(rng.uniform(size=likely.shape) < 0.7)
    proposal = proposal.replace(tokens=jnp.where(is_likely, likely, proposal.tokens))
    greedy = jax.jit(get_rule("greedy").accept)(target, proposal, noise)
    assert 0 < float(greedy.num_accepted.mean()) < WIDTH
    for rule in (typical(), typical(0.0, 0.0), typical(1.0, 0.9)):
        verdict = jax.jit(rule.accept)(target, proposal, noise)
        np.testing.assert_array_equal(verdict.num_accepted, greedy.num_accepted)
        np.testing.assert_array_equal(verdict.next_token, greedy.next_token)


def test_the_next_token_is_drawn_from_the_target():
    """Never from a residual: after a refusal the refused draft may come again."""
    target, proposal, noise = random_round(np.random.default_rng(2))
    verdict = jax.jit(typical().accept)(target, proposal, noise)
    distributions = np.asarray(target)[np.arange(ROWS), np.asarray(verdict.num_accepted)]
    with np.errstate(divide="ignore"):
        expected = np.argmax(np.log(distributions) + np.asarray(noise.gumbel), axis=-1)
    np.testing.assert_array_equal(verdict.next_token, expected)
    np.testing.assert_array_equal(
        next_token_probs(typical(), target, proposal, verdict.num_accepted), distributions
    )

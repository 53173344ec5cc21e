"""Tables of unigrams and bigrams, and random tokens, as drafters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.tables import (
    TableDrafter,
    bigram_logits,
    count_ngrams,
    table_params,
    uniform_logits,
    unigram_logits,
)
from jspec.speculation.types import Kind
from tests.speculation import drive

VOCAB, TARGET_VOCAB, WIDTH = 5, 7, 3  # the target's distributions are padded
TEXT = [0, 1, 2, 0, 1, 0, 1, 2, 2, 3]  # 4 never comes, and nothing follows 3
UNIGRAMS = np.array([3, 3, 3, 1, 0]) / 10
BIGRAMS = np.array([[0, 3, 0, 0, 0], [1, 0, 2, 0, 0], [1, 0, 1, 1, 0]]) / 3
DISTRIBUTIONS = {
    "unigram": np.tile(UNIGRAMS, [5, 1]),
    "bigram": np.concatenate([BIGRAMS, UNIGRAMS[None], UNIGRAMS[None]]),
    "random": np.full([5, 5], 0.2),
}
LOGITS = {
    "unigram": unigram_logits,
    "bigram": bigram_logits,
    "random": functools.partial(uniform_logits, vocab_size=VOCAB),
}


@functools.cache
def parameters(name):
    """Returns the drafter's parameters."""
    return None if name == "random" else table_params(count_ngrams([TEXT], VOCAB), name)


def propose(name, last_token, temperature, limit=WIDTH, min_confidence=0.0):
    """Returns the proposal after some tokens."""
    kind, sizes = Kind(name, 0.2, 0.2), (WIDTH, TARGET_VOCAB, TARGET_VOCAB)
    drafter = TableDrafter(*sizes, min_confidence, kind=kind, logits=LOGITS[name])
    proposal, state = drive.propose(
        None, drafter, parameters(name), drafter.init(len(last_token), 16), last_token, limit,
        temperature, seeds=np.arange(len(last_token)),
    )  # fmt: skip
    assert state == ()
    return proposal


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_are_the_counts(name):
    """Of every draft, given the one before; a token that nothing followed falls back."""
    for temperature in (1.0, 0.5):
        proposal = propose(name, np.arange(50) % 5, temperature)
        before = np.concatenate([(np.arange(50) % 5)[:, None], proposal.tokens[:, :-1]], axis=1)
        distribution = DISTRIBUTIONS[name][before] ** (1 / temperature)
        distribution /= distribution.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(proposal.probs[..., :VOCAB], distribution, rtol=1e-5, atol=1e-7)
        assert (np.asarray(proposal.probs)[..., VOCAB:] == 0).all()
        drawn = np.take_along_axis(distribution, np.asarray(proposal.tokens)[..., None], axis=2)
        assert (drawn > 0).all()
        assert (proposal.num_tokens == WIDTH).all()


@pytest.mark.parametrize(("name", "chain"), [("unigram", [0, 0]), ("bigram", [1, 2])])
def test_temperature_zero_says_the_most_likely(name, chain):
    """Of equals the first, after token 0."""
    proposal = propose(name, np.arange(50) % 5, 0.0)
    assert proposal.tokens[0, :2].tolist() == chain
    assert proposal.probs[0, 0, chain[0]] == 1


def test_limits_are_kept_and_rows_differ():
    """No more than is wanted; the same token in another row draws for itself."""
    proposal = propose("random", [1] * 50, 1.0, limit=np.arange(50) % 4)
    assert proposal.num_tokens.tolist() == [i % 4 for i in range(50)]
    assert len({tuple(row) for row in proposal.tokens.tolist()}) > 10


def test_an_unsure_row_is_silent():
    """`draft_confidence` looks at each distribution before it is drawn from."""
    proposal = propose("bigram", np.arange(50) % 5, 1.0, min_confidence=0.9)
    assert proposal.num_tokens[:5].tolist() == [1, 0, 0, 0, 0]  # 0 is sure of 1, which is not


def test_only_the_most_frequent_continuations_are_kept():
    """Two of three: the distribution is renormalised among them."""
    table = count_ngrams([TEXT], VOCAB, num_continuations=2)
    logits = bigram_logits(table_params(table, "bigram"), jnp.array([2, 1], jnp.int32))
    distribution = np.asarray(jax.nn.softmax(logits))
    np.testing.assert_allclose(
        distribution, [[0.5, 0, 0.5, 0, 0], [1 / 3, 0, 2 / 3, 0, 0]], rtol=1e-5
    )

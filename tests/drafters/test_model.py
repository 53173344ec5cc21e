"""The model drafter: vocabularies of other sizes, and catching up after a silence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.memory import CATCH_UP_WIDTH
from jspec.drafters.model import ModelDrafter
from tests import tiny
from tests.speculation.drive import assert_committed_equal, propose
from tests.speculation.toys import toy_apply, toy_cache


def run_propose(drafter, params, state, last_token, temperature=0.0):
    """Proposes with seed 0 for every row."""
    return propose(None, drafter, params, state, last_token, 3, temperature)


def observe(drafter, state, tokens, counts):
    """Commits the first so many tokens of each row."""
    tokens = jnp.asarray(tokens, jnp.int32)
    valid = jnp.arange(tokens.shape[1]) < jnp.asarray(counts)[:, None]
    return drafter.observe(None, state, tokens, jnp.zeros((*tokens.shape, 1)), valid)


@pytest.mark.parametrize("draft_vocab", [5, 8], ids=["draft unpadded", "draft padded further"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_of_the_vocabulary_is_never_proposed(draft_vocab, temperature):
    """Members of one family pad differently; distributions come at the target's width, 0 on the
    padding.
    """
    shared, target_vocab = 5, 7
    rng = np.random.default_rng(0)
    table = rng.normal(size=(draft_vocab,) * 3)
    table[..., shared:] += 50  # what the draft would rather say
    table = jnp.asarray(table, jnp.float32)
    drafter = ModelDrafter(3, shared, target_vocab, apply=toy_apply, init_cache=toy_cache)
    state = observe(drafter, drafter.init(20, 16), [[1, 2]] * 20, [2] * 20)
    last = np.arange(20) % shared
    proposal, _ = run_propose(drafter, table, state, last, temperature)
    assert proposal.probs.shape == (20, 3, target_vocab)
    assert (np.asarray(proposal.tokens) < shared).all()
    assert (np.asarray(proposal.probs)[..., shared:] == 0).all()
    np.testing.assert_allclose(proposal.probs.sum(axis=-1), 1, rtol=1e-5)
    if temperature > 0:  # the real distribution, renormalised over the shared part
        expected = jax.nn.softmax(table[2, last][:, :shared])
        np.testing.assert_allclose(proposal.probs[:, 0, :shared], expected, rtol=1e-4)


CAPACITY = 2 * CATCH_UP_WIDTH + 60


@pytest.fixture(scope="module")
def text():
    return np.random.default_rng(0).integers(0, 61, (3, CAPACITY))


@pytest.fixture(scope="module")
def drafter(tiny_pair):
    return ModelDrafter(3, 61, 61, apply=tiny_pair.apply, init_cache=tiny.empty_cache)


@pytest.fixture(scope="module")
def fresh(tiny_pair, text):
    call = jax.jit(tiny_pair.apply)
    tokens = jnp.asarray(text, jnp.int32)
    return call(tiny_pair.draft, tokens, tiny.empty_cache(3, CAPACITY))


LENGTHS = np.array([2 * CATCH_UP_WIDTH + 30, CATCH_UP_WIDTH + 1, 1])


@pytest.fixture(scope="module")
def lagging(drafter, text):
    """Returns a state that has observed much, in rounds of five tokens, and proposed nothing."""
    call = jax.jit(lambda state, tokens, counts: observe(drafter, state, tokens, counts))
    state = drafter.init(3, CAPACITY)
    for start in range(0, LENGTHS.max(), 5):
        counts = np.clip(LENGTHS - start, 0, 5).astype(np.int32)
        state = call(state, text[:, start : start + 5].astype(np.int32), counts)
    return state


def test_a_lagging_drafter_catches_up_without_a_hole(drafter, tiny_pair, text, fresh, lagging):
    """Back from a fallback to plain decoding, on rows that missed 158, 65 and 1 tokens."""
    last = text[np.arange(3), LENGTHS]
    proposal, state = run_propose(drafter, tiny_pair.draft, lagging, last)
    assert state.cache.length.tolist() == LENGTHS.tolist()
    assert_committed_equal(state.cache, fresh[2])
    first = jnp.argmax(fresh[0][jnp.arange(3), LENGTHS], axis=-1)
    np.testing.assert_array_equal(proposal.tokens[:, 0], first)


@pytest.mark.parametrize("missing", [1, 9])
def test_the_last_missing_token_is_read(drafter, tiny_pair, text, fresh, missing):
    """Guards against one token too few: a wider call or a neighbour's often reads it by chance.

    Here every row misses the same number, which leaves one token for its own call.
    """
    lengths = np.full(3, missing + 1)
    state = observe(drafter, drafter.init(3, CAPACITY), text[:, : missing + 1], lengths)
    _, state = run_propose(drafter, tiny_pair.draft, state, text[np.arange(3), lengths])
    assert state.cache.length.tolist() == lengths.tolist()
    assert_committed_equal(state.cache, fresh[2])


def test_silence_between_proposals_leaves_no_hole(drafter, tiny_pair, text, fresh, lagging):
    """Drafts that were fed and then overtaken by plain decoding must not count as cached."""
    last = text[np.arange(3), LENGTHS]
    _, state = run_propose(drafter, tiny_pair.draft, lagging, last)
    slots = LENGTHS[:, None] + np.arange(4)
    tokens = np.take_along_axis(text, slots, axis=1)
    state = observe(drafter, state, tokens, [4, 1, 4])
    slots += np.array([[4], [1], [4]])
    state = observe(drafter, state, np.take_along_axis(text, slots, axis=1), [4, 4, 0])
    lengths = LENGTHS + np.array([8, 5, 4])
    assert (np.asarray(state.cache.length) <= lengths).all()
    assert_committed_equal(state.cache, fresh[2])
    proposal, state = run_propose(drafter, tiny_pair.draft, state, text[np.arange(3), lengths])
    assert state.cache.length.tolist() == lengths.tolist()
    assert_committed_equal(state.cache, fresh[2])
    first = jnp.argmax(fresh[0][jnp.arange(3), lengths], axis=-1)
    np.testing.assert_array_equal(proposal.tokens[:, 0], first)


def test_drafts_of_an_earlier_round_are_forgotten(drafter, tiny_pair, lagging, text):
    """In a silence the text may say again what was fed once: that does not make it cached.

    A repetition of `last` is enough, and greedy texts are full of them.
    """
    last = text[np.arange(3), LENGTHS]
    _, state = run_propose(drafter, tiny_pair.draft, lagging, last)
    block = np.stack([last, last, last, last], axis=1)
    state = observe(drafter, state, block, [1, 1, 1])
    cached = state.cache.length.tolist()
    state = observe(drafter, state, block, [1, 2, 4])
    assert state.cache.length.tolist() == cached


def test_only_drafts_that_were_kept_stay_cached(drafter, tiny_pair, text, lagging):
    """The round commits [last, d1, x]: two fed tokens stay; the third was something else."""
    last = text[np.arange(3), LENGTHS]
    proposal, state = run_propose(drafter, tiny_pair.draft, lagging, last)
    drafts = np.asarray(proposal.tokens)
    wrong = (drafts[:, 1] + 1) % 61
    block = np.stack([last, drafts[:, 0], wrong], axis=1)
    after = observe(drafter, state, block, [3, 2, 0])
    assert (after.cache.length - state.cache.length).tolist() == [2, 2, 0]
    assert (after.history.length - state.history.length).tolist() == [3, 2, 0]

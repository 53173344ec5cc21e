"""The head as drafter: its chains, its lag, and the distributions through the whole step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters import DrafterOptions, DrafterSpec, make_drafter
from tests import tiny, tiny_eagle
from tests.drafters.rows import LENGTHS, WIDTH, observe
from tests.speculation import drive


@pytest.fixture(scope="module")
def head():
    return tiny_eagle.params()


@pytest.fixture(scope="module")
def observed(tiny_pair, head):
    """Returns the state that has seen another number of tokens of each row, and proposed never."""
    return observe(tiny_pair, tiny_eagle.drafter(WIDTH), head)


def propose(tiny_pair, head, state, last, limit, temperature=0.0, vocab_size=61):
    """Returns what the drafter of a head proposes, and its state."""
    drafter = dataclasses.replace(tiny_eagle.drafter(WIDTH), vocab_size=vocab_size)
    return drive.propose(tiny_pair, drafter, head, state, last, limit, temperature)


def test_a_lagging_head_says_what_a_fresh_one_says(tiny_pair, head, text, last, observed):
    """Rows that missed 139, 65 and 2 pairs: the chain is that of calls over everything."""
    proposal, state = propose(tiny_pair, head, observed, last, [WIDTH] * 3)
    np.testing.assert_array_equal(state.cache.length, LENGTHS)
    for row, length in enumerate(LENGTHS):
        _, drafts = tiny_eagle.chain_logits(
            tiny_pair, head, text[row, : length + 1].tolist(), WIDTH
        )
        np.testing.assert_array_equal(proposal.tokens[row], drafts)


def test_its_distribution_is_the_heads_softmax_over_what_it_can_propose(
    tiny_pair, head, text, last, observed
):
    """At temperature 1; other tokens of the target have probability 0."""
    proposal, _ = propose(tiny_pair, head, observed, last, [WIDTH] * 3, temperature=1.0)
    others = np.setdiff1d(np.arange(61), np.asarray(head["ids"]))
    assert (np.asarray(proposal.probs)[..., others] == 0).all()
    logits, _ = tiny_eagle.chain_logits(tiny_pair, head, text[2, : LENGTHS[2] + 1].tolist(), 1)
    expected = jax.nn.softmax(logits[0])
    np.testing.assert_allclose(proposal.probs[2, 0][head["ids"]], expected, rtol=1e-4, atol=1e-6)


def test_the_padding_of_a_vocabulary_is_never_proposed(tiny_pair, head, text, last, observed):
    """Ids that no tokenizer has, at the end of the target's table; the distribution is of the
    others.
    """
    used = 50
    proposal, _ = propose(tiny_pair, head, observed, last, [WIDTH] * 3, 1.0, vocab_size=used)
    assert (np.asarray(proposal.tokens) < used).all()
    assert (np.asarray(proposal.probs)[..., used:] == 0).all()
    np.testing.assert_array_equal(proposal.num_tokens, [WIDTH] * 3)
    logits, _ = tiny_eagle.chain_logits(tiny_pair, head, text[2, : LENGTHS[2] + 1].tolist(), 1)
    is_used = np.asarray(head["ids"]) < used
    expected = jax.nn.softmax(logits[0][is_used])
    said = proposal.probs[2, 0][head["ids"][is_used]]
    np.testing.assert_allclose(said, expected, rtol=1e-4, atol=1e-6)


def test_a_head_of_a_folder_is_told_of_the_padding(tmp_path):
    """Guards against a drafter that is right, and never told."""
    folder = tiny_eagle.save_head(tmp_path / "head", tiny.CONFIG)
    options = DrafterOptions(draft_head=folder, draft_confidence=0.25)
    spec = DrafterSpec(WIDTH, tiny.CONFIG, 59, None, jnp.float32, options=options)
    drafter = make_drafter("eagle", spec).drafter
    assert (drafter.vocab_size, drafter.config.target_vocab_size) == (59, 61)
    assert (drafter.num_draft_tokens, drafter.min_confidence) == (WIDTH, 0.25)


def test_a_row_of_which_nothing_is_wanted_lags(tiny_pair, head, text, last, observed):
    """Its cache stays where it was, its neighbour's does not, and it proposes nothing."""
    proposal, state = propose(tiny_pair, head, observed, last, [0, 2, 0])
    np.testing.assert_array_equal(proposal.num_tokens, [0, 2, 0])
    np.testing.assert_array_equal(state.cache.length, [0, LENGTHS[1], 0])

"""Look-ahead embeddings: what they draft, what stays in the target's cache, and parity."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from jspec.common.errors import InputError
from jspec.drafters import DrafterOptions, DrafterSpec, make_drafter
from tests import tiny, tiny_lookahead
from tests.drafters.rows import CAPACITY, LENGTHS, WIDTH
from tests.speculation import drive
from tests.speculation.drive import assert_committed_equal
from tests.tiny_heads import SAVE_HEAD


@pytest.fixture(scope="module")
def embeddings():
    return tiny_lookahead.params()


@pytest.fixture(scope="module")
def cache(tiny_pair, text):
    """Returns the target's cache of rows of different lengths."""
    empty = tiny.empty_cache(len(LENGTHS), 2 * CAPACITY)
    written = jax.jit(tiny_pair.apply)(tiny_pair.target, jnp.asarray(text), empty)[2]
    return written.commit(jnp.asarray(LENGTHS, jnp.int32))


@pytest.fixture(scope="module")
def logits(tiny_pair, embeddings, text):
    """Returns what the target says of all drafts of every row, [b w v]."""
    said = [
        tiny_lookahead.logits_after(
            tiny.CONFIG, tiny_pair.target, embeddings["embeddings"][: WIDTH - 1],
            text[row, : length + 1],
        )
        for row, length in enumerate(LENGTHS)
    ]  # fmt: skip
    return np.stack(said)


def propose(pair, embeddings, cache, text, limit, temperature=0.0, vocab_size=None, **options):
    """Proposes with seed 0 for every row."""
    drafter = tiny_lookahead.drafter(WIDTH, **options)
    if vocab_size is not None:
        drafter = dataclasses.replace(drafter, vocab_size=vocab_size)
    last = text[np.arange(len(LENGTHS)), LENGTHS]
    return drive.propose(pair, drafter, embeddings, (), last, limit, temperature, cache=cache)[0]


def test_drafts_are_what_the_target_says(tiny_pair, embeddings, cache, text, logits):
    """Rows of different lengths, of which another number of drafts is wanted."""
    limit = np.array([WIDTH, 2, 0])
    proposal = propose(tiny_pair, embeddings, cache, text, limit)
    np.testing.assert_array_equal(proposal.num_tokens, limit)
    meant = np.arange(WIDTH) < limit[:, None]
    np.testing.assert_array_equal(proposal.tokens[meant], logits.argmax(axis=-1)[meant])


def test_the_distribution_is_the_softmax_of_what_it_says(
    tiny_pair, embeddings, cache, text, logits
):
    """At a temperature."""
    proposal = propose(tiny_pair, embeddings, cache, text, [WIDTH] * 3, temperature=0.7)
    expected = scipy.special.softmax(logits / 0.7, axis=-1)
    np.testing.assert_allclose(proposal.probs, expected, rtol=1e-3, atol=1e-5)


def test_the_padding_of_a_vocabulary_is_never_proposed(tiny_pair, embeddings, cache, text):
    """Ids that no tokenizer has, at the end of the target's table."""
    proposal = propose(
        tiny_pair, embeddings, cache, text, [WIDTH] * 3, temperature=1.0, vocab_size=20
    )
    assert (np.asarray(proposal.tokens) < 20).all()
    assert (np.asarray(proposal.probs)[..., 20:] == 0).all()


def test_nothing_of_the_look_ahead_is_committed(tiny_pair, embeddings, cache, text):
    """The committed slots are as they were, and the verify call begins at the first layer."""
    prefix = propose(tiny_pair, embeddings, cache, text, [WIDTH] * 3).prefix
    np.testing.assert_array_equal(prefix.cache.length, LENGTHS)
    assert_committed_equal(prefix.cache, cache, atol=0)
    assert prefix.num_layers == 0


def test_without_a_wish_the_target_is_not_called(tiny_pair, embeddings, cache, text):
    """Not even the slots behind the committed ones change."""
    proposal = propose(tiny_pair, embeddings, cache, text, [0, 0, 0])
    for ours, before in zip(proposal.prefix.cache.keys, cache.keys, strict=True):
        np.testing.assert_array_equal(ours, before)


def spec_of(folder, num_draft_tokens=3):
    """Returns what the drafter of a folder is built from."""
    options = DrafterOptions(draft_head=None if folder is None else str(folder))
    return DrafterSpec(num_draft_tokens, tiny.CONFIG, 61, None, jnp.float32, options=options)


def test_there_is_one_draft_more_than_embeddings(tmp_path):
    """Three embeddings make chains of four."""
    tiny_lookahead.save_head(tmp_path / "head", tiny.CONFIG)
    for wanted, got in ((1, 1), (7, 4)):
        drafter = make_drafter("lookahead", spec_of(tmp_path / "head", wanted)).drafter
        assert drafter.num_draft_tokens == got
        assert drafter.kinds[0].most == got


def test_embeddings_are_asked_for(tmp_path):
    """And heads of every other kind are named."""
    with pytest.raises(InputError, match="'lookahead' expects draft_head"):
        make_drafter("lookahead", spec_of(None))
    for foreign in SAVE_HEAD.keys() - {"lookahead"}:
        SAVE_HEAD[foreign](tmp_path / foreign, tiny.CONFIG)
        with pytest.raises(InputError, match="look-ahead embeddings; it has no lookahead_num_tok"):
            make_drafter("lookahead", spec_of(tmp_path / foreign))

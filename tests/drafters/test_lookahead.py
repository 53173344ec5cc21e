"""Look-ahead embeddings: what they draft, and what stays in the target's cache.

The target has scales, caps and a window: every call of it sees the same, whoever embeds the block.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from jspec.models import make_apply
from tests import tiny, tiny_lookahead
from tests.drafters import rows
from tests.drafters.rows import CAPACITY, LAST, LENGTHS, TEXT, WIDTH
from tests.speculation.drive import assert_committed_equal

CONFIG = dataclasses.replace(
    tiny.CONFIG, embedding_scale=7.0, residual_scale=0.7, logits_scale=0.6, logits_softcap=9.0,
    attention_softcap=6.0, window=6, windowed_layers=(0,),
)  # fmt: skip
APPLY = tiny.one_program(make_apply(CONFIG))
TARGET = types.SimpleNamespace(apply=APPLY, target=tiny.random_params(CONFIG, seed=0, std=0.4))
EMBEDDINGS = tiny_lookahead.params()
USED = 50  # ids that are no padding


@pytest.fixture(scope="module")
def cache():
    """Returns the target's cache of rows of different lengths."""
    empty = tiny.empty_cache(len(LENGTHS), CAPACITY)
    written = APPLY(TARGET.target, jnp.asarray(TEXT), empty)[2]
    return written.commit(jnp.asarray(LENGTHS, jnp.int32))


@pytest.fixture(scope="module")
def logits():
    """Returns what the target says of all drafts of every row, [b w v]."""
    ahead = EMBEDDINGS["embeddings"][: WIDTH - 1]
    said = np.stack([
        tiny_lookahead.logits_after(CONFIG, TARGET.target, ahead, TEXT[row, : length + 1])
        for row, length in enumerate(LENGTHS)
    ])  # fmt: skip
    said[..., USED:] = -np.inf
    return said


def propose(cache, limit, temperature=0.0):
    """Proposes with seed 0 for every row; ids that no tokenizer has lie at the table's end."""
    drafter = dataclasses.replace(tiny_lookahead.drafter(WIDTH), vocab_size=USED)
    options = {"temperature": temperature, "limit": limit, "cache": cache}
    return rows.propose(TARGET, drafter, EMBEDDINGS, (), **options)[0]


def test_drafts_are_what_the_target_says(cache, logits):
    """Rows of different lengths, of which another number of drafts is wanted.

    Nothing of the look ahead is committed, and the verify call on what was proposed begins at the
    first layer.
    """
    limit = np.array([WIDTH, 2, 0])
    proposal = propose(cache, limit)
    np.testing.assert_array_equal(proposal.num_tokens, limit)
    meant = np.arange(WIDTH) < limit[:, None]
    np.testing.assert_array_equal(proposal.tokens[meant], logits.argmax(axis=-1)[meant])
    prefix = proposal.prefix
    np.testing.assert_array_equal(prefix.cache.length, LENGTHS)
    assert_committed_equal(prefix.cache, cache, atol=0)
    assert prefix.num_layers == 0
    block = np.concatenate([LAST[:, None], proposal.tokens], axis=1)
    verify = jax.jit(lambda target, block, cache: APPLY(target, block, cache, first_layer=0)[0])
    begun = verify(TARGET.target, prefix.hidden, prefix.cache)
    np.testing.assert_allclose(begun, verify(TARGET.target, block, cache), atol=1e-5)


def test_the_distribution_is_the_softmax_of_what_it_says(cache, logits):
    """At a temperature, without what is padding of the target's table."""
    proposal = propose(cache, [WIDTH] * 3, temperature=0.7)
    expected = scipy.special.softmax(logits / 0.7, axis=-1)
    np.testing.assert_allclose(proposal.probs, expected, rtol=1e-3, atol=1e-5)
    assert (np.asarray(proposal.tokens) < USED).all()


def test_without_a_wish_the_target_is_not_called(cache):
    """Not even the slots behind the committed ones change."""
    proposal = propose(cache, [0, 0, 0])
    for ours, before in zip(proposal.prefix.cache.keys, cache.keys, strict=True):
        np.testing.assert_array_equal(ours, before)

"""Token recycling against a plain dict, and the chain that follows its table."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jspec.drafters.recycle import RecycleDrafter
from jspec.sampling.distribution import NO_TOKEN
from tests.speculation import drive

VOCAB, WIDTH, BATCH, BLOCK, COUNT = 6, 4, 3, 5, 2
DRAFTER = RecycleDrafter(WIDTH, VOCAB, COUNT)
observe = jax.jit(DRAFTER.observe_runners_up)


def flags(counts):
    return jnp.arange(BLOCK) < jnp.asarray(counts)[:, None]


def show(table, tokens, runners_up, num_fed, num_valid):
    """Returns the table after a block; counts are those of the rows."""
    tokens, runners_up = (jnp.asarray(leaf, jnp.int32) for leaf in (tokens, runners_up))
    return observe(table, tokens, runners_up, flags(num_fed), flags(num_valid))


def propose(table, last_tokens, limit=WIDTH):
    """Returns each row's drafts."""
    proposal, after = drive.propose(None, DRAFTER, None, table, last_tokens, limit)
    np.testing.assert_array_equal(after, table)
    assert proposal.probs is None, "drafts that follow from the past have a one-hot distribution"
    assert (np.asarray(proposal.tokens) >= 0).all(), "ids that can be looked up"
    return drive.drafts_of(proposal)


token = st.integers(0, VOCAB - 1)
token_ids = st.integers(NO_TOKEN, VOCAB - 1)
row = st.tuples(
    st.lists(token, min_size=BLOCK, max_size=BLOCK),
    st.lists(st.tuples(token_ids, token_ids), min_size=BLOCK, max_size=BLOCK),
    st.integers(0, BLOCK),
    st.integers(0, BLOCK),
)


@hypothesis.settings(deadline=None, max_examples=50, derandomize=True)
@hypothesis.given(rounds=st.lists(st.lists(row, min_size=BATCH, max_size=BATCH), max_size=4))
def test_the_table_equals_a_dict(rounds):
    """Blocks with tokens that come again, of which some are padding and some were rejected."""
    table, expected = DRAFTER.init(BATCH, 9), [{} for _ in range(BATCH)]
    for block in rounds:
        num_fed = [fed for *_, fed, _ in block]
        num_valid = [min(fed, valid) for *_, fed, valid in block]
        table = show(table, [t for t, *_ in block], [r for _, r, *_ in block], num_fed, num_valid)
        for row, (tokens, runners_up, fed, _) in enumerate(block):
            valid = num_valid[row]
            # The rejected ones first, so that committed ones are written over them.
            for i in [*range(valid, fed), *range(valid)]:
                expected[row][tokens[i]] = runners_up[i]
    for row, known in enumerate(expected):
        for token in range(VOCAB):
            assert tuple(table[row, token].tolist()) == known.get(token, (NO_TOKEN,) * COUNT)
    for row, drafts in enumerate(propose(table, [0, 1, 2])):
        chain, token = [], row
        while len(chain) < WIDTH and (token := expected[row].get(token, (NO_TOKEN,))[0]) >= 0:
            chain.append(token)
        assert drafts == chain


def test_limits_are_kept():
    """And the chain may go round."""
    table = DRAFTER.init(BATCH, 9).at[:, 1, 0].set(2).at[:, 2, 0].set(1)
    for limit in range(WIDTH):
        assert propose(table, [1, 2, 0], limit) == [[2, 1, 2][:limit], [1, 2, 1][:limit], []]

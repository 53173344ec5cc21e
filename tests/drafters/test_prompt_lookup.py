"""Prompt lookup against a plain Python search."""

import hypothesis
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jspec.drafters.memory import History
from jspec.drafters.prompt_lookup import PromptLookupDrafter
from tests.speculation import drive

CAPACITY = 24
MAX_MATCH = 5
WIDTH = 4


def as_history(rows):
    # What lies behind the text is not 0: nothing may look at it.
    tokens = np.full([len(rows), CAPACITY], 1, np.int32)
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = text
    return History(jnp.asarray(tokens), jnp.asarray([len(text) for text in rows], jnp.int32))


def propose_after(drafter, rows, params=None, **options):
    """Returns the proposal for texts, the last token of each not yet committed."""
    history = as_history([text[:-1] for text in rows])
    last = [text[-1] for text in rows]
    proposal, state = drive.propose(None, drafter, params, history, last, **options)
    assert state.length.tolist() == [len(text) - 1 for text in rows]
    return proposal


def reference_match(text):
    """Returns (length, end) of the longest earlier match of the end; the latest of equals."""
    best = (0, 0)
    for end in range(len(text) - 1):
        length = 0
        while length < MAX_MATCH and length <= end and text[end - length] == text[-1 - length]:
            length += 1
        if length >= best[0]:
            best = (length, end)
    return best


def reference_drafts(text, min_match):
    """Returns the drafts: what followed the match, itself continued."""
    length, end = reference_match(text)
    if length < min_match or length == 0:
        return []
    grown = list(text)
    for i in range(WIDTH):
        grown.append(grown[end + 1 + i])
    return grown[len(text) :]


def propose(rows, min_match, growth=0.0):
    """Returns the proposal; each row's last token is the one not yet committed."""
    drafter = PromptLookupDrafter(WIDTH, min_match, MAX_MATCH, growth)
    proposal = propose_after(drafter, rows, ())
    assert proposal.probs is None, "drafts that follow from the text have a one-hot distribution"
    return proposal


texts = st.lists(st.integers(0, 2), min_size=1, max_size=CAPACITY)


@hypothesis.settings(deadline=None, max_examples=80, derandomize=True)
@hypothesis.given(rows=st.lists(texts, min_size=4, max_size=4), min_match=st.sampled_from([1, 3]))
def test_drafts_equal_a_plain_continuation(rows, min_match):
    """A match that touches the end goes on copying what it has proposed."""
    proposal = propose(rows, min_match)
    expected = [reference_drafts(text, min_match) for text in rows]
    assert drive.drafts_of(proposal) == expected
    lengths = [reference_match(text)[0] for text in rows]
    assert proposal.kind.tolist() == [max(length, 1) - 1 for length in lengths]


def test_growth_bounds_the_drafts_by_the_match():
    """Matches of 1, 2 and 5 tokens, 1.5 drafts for each token; the width bounds them as before."""
    rows = [[5, 1, 7, 1], [6, 1, 2, 7, 5, 1, 2], [0, 1, 2, 1, 0, 2, 3, 0, 1, 2, 1, 0], [4, 5, 6]]
    short, whole = (drive.drafts_of(propose(rows, 1, growth)) for growth in (1.5, 0.0))
    assert [len(drafts) for drafts in short] == [1, 3, 4, 0]
    assert short[1] == whole[1][:3]

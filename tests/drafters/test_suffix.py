"""Suffix decoding against a plain Python search, of the text itself and of a corpus."""

import fractions

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jspec.drafters.corpus import MAX_MATCH, make_corpus
from jspec.drafters.prompt_lookup import own_matches
from jspec.drafters.suffix import SuffixDrafter
from tests.drafters.test_prompt_lookup import CAPACITY, as_history, propose_after
from tests.speculation.drive import drafts_of

WIDTH, BATCH = 4, 4
DRAFTERS = [
    SuffixDrafter(WIDTH, growth=growth, min_share=min_share, min_match=min_match)
    for growth, min_share, min_match in ((1.0, 0.0, 0), (2.5, 0.35, 0))
]
TEXTS = [[0, 1, 2, 0, 1], [2, 2, 1, 0], [1], [0, 0, 2, 1, 2, 0]]
CORPUS = make_corpus(TEXTS, vocab_size=10)  # of fewer places than are asked: all of them are
_own_matches = jax.jit(own_matches, static_argnames=("max_match", "num_places", "width"))


def agreeing(left, right):
    """Returns how many tokens at the end of two texts agree."""
    length, most = 0, min(len(left), len(right), MAX_MATCH)
    while length < most and left[-1 - length] == right[-1 - length]:
        length += 1
    return length


def own_places(text):
    """Returns (tokens that agree, what followed) of each place in a text, the newest first."""
    actual = []
    for end in reversed(range(len(text) - 1)):
        grown = list(text)
        for i in range(WIDTH):  # a repetition is continued
            grown.append(grown[end + 1 + i])
        actual.append((agreeing(text[: end + 1], text), grown[end + 1 : end + 1 + WIDTH]))
    return [(length, tokens) for length, tokens in actual if length]


def corpus_places(text):
    """Returns the same of each place in the corpus, which is trusted one token less."""
    places = [(other[: i + 1], other[i + 1 :]) for other in TEXTS for i in range(len(other) - 1)]
    actual = [(agreeing(before, text) - 1, after[:WIDTH]) for before, after in places]
    return [(length, tokens) for length, tokens in actual if length >= 0]


def expected_drafts(drafter, places):
    """Returns the longest match, -1 for none, and all drafts that have the most votes."""
    longest = max((length for length, _ in places), default=-1)
    if longest < drafter.min_match:
        return longest, [[]]
    weights = [fractions.Fraction(4) ** (length - longest) for length, _ in places]
    weights = [weight if weight >= fractions.Fraction(4) ** -6 else 0 for weight in weights]
    actual = []
    for _, tokens in places:
        score, drafts = 0, []
        for i in range(min(len(tokens), int(drafter.growth * max(longest, 1)))):
            pairs = zip(places, weights, strict=True)
            votes = sum(w for (_, other), w in pairs if other[: i + 1] == tokens[: i + 1])
            if not votes or votes < drafter.min_share * sum(weights):
                break
            score, drafts = score + votes, tokens[: i + 1]
        actual.append((score, drafts))
    best = max(score for score, _ in actual)
    return longest, [drafts for score, drafts in actual if score == best]


def propose(drafter, rows, limit=WIDTH, has_corpus=False):
    """Returns the drafts and the kind of each row, whose last token is not committed yet."""
    proposal = propose_after(drafter, rows, (CORPUS,) if has_corpus else (), limit=limit)
    assert proposal.probs is None, "drafts that follow from the text have a one-hot distribution"
    return drafts_of(proposal), proposal.kind.tolist()


texts = st.lists(st.integers(0, 2), min_size=1, max_size=CAPACITY)
batches = st.lists(texts, min_size=BATCH, max_size=BATCH)


@hypothesis.settings(deadline=None, max_examples=60, derandomize=True)
@hypothesis.given(rows=batches, drafter=st.sampled_from(DRAFTERS), has_corpus=st.booleans())
def test_drafts_have_the_most_votes_of_a_plain_search(rows, drafter, has_corpus):
    """Three letters, so that many places agree; in exact fractions, so that all ties are known."""
    for text, drafts, kind in zip(rows, *propose(drafter, rows, WIDTH, has_corpus), strict=True):
        places = own_places(text) + (corpus_places(text) if has_corpus else [])
        longest, expected = expected_drafts(drafter, places)
        assert drafts in expected
        assert kind == min(max(longest, 1), len(drafter.kinds)) - 1
        if not has_corpus and drafts:  # of equals the longest match, the newest first
            places.sort(key=lambda place: -place[0])
            assert drafts == expected_drafts(drafter, places)[1][0]


def test_limits_are_kept():
    """A smaller limit cuts the same drafts; a match of n tokens has at most `growth` times n."""
    rows = [[1, 2, 0, 1, 2, 0, 1], [0, 0, 0, 0], [2, 1, 2, 1, 2], [0]]
    full, _ = propose(DRAFTERS[0], rows, has_corpus=True)
    assert max(map(len, full)) == WIDTH
    for limit in range(WIDTH):
        drafts, _ = propose(DRAFTERS[0], rows, limit, has_corpus=True)
        assert drafts == [row[:limit] for row in full]
    assert [kind.most for kind in DRAFTERS[0].kinds] == [1, 2, 3, 4, 4, 4, 4, 4]
    assert [kind.most for kind in SuffixDrafter(20, growth=1.0).kinds] == [*range(1, 8), 16]


def test_the_corpus_is_asked_where_the_text_knows_less():
    """A place in the corpus needs one token more than one in the text to count as much."""
    rows = [[7, 1, 2, 0], [8, 1, 9, 8, 1], [1, 0, 3, 1, 2, 2, 1], [9]]
    alone, _ = propose(DRAFTERS[1], rows)
    proposed, _ = propose(DRAFTERS[1], rows, has_corpus=True)
    assert alone == [[], [9, 8, 1, 9], [2, 2], []]
    assert proposed == [[1], [9, 8, 1, 9], [0], []]


@pytest.mark.parametrize("num_places", [3, 16])
def test_of_many_places_the_longest_and_newest_are_asked(num_places):
    """About half of `CAPACITY` places agree; so many are kept, in order, and no others."""
    text = np.random.default_rng(0).integers(0, 2, CAPACITY).tolist()
    actual = _own_matches(as_history([text]), max_match=4, num_places=num_places, width=WIDTH)
    places = sorted(((min(n, 4), -i, t) for i, (n, t) in enumerate(own_places(text))), reverse=True)
    expected = [(length, tokens) for length, _, tokens in places[:num_places]]
    pairs = zip(actual.agreement[0].tolist(), actual.followed[0].tolist(), strict=True)
    assert [place for place in pairs if place[0] >= 0] == expected


def test_a_row_does_not_depend_on_the_room_that_a_neighbour_makes():
    """Of a long prompt."""
    text = [1, 0, 2, 2, 1, 0]
    narrow, wide = (
        _own_matches(as_history([text]).replace(tokens=tokens), max_match=8, num_places=6, width=3)
        for tokens in (jnp.asarray([text], jnp.int32), as_history([text]).tokens)
    )
    is_place = np.asarray(narrow.agreement) > 0
    np.testing.assert_array_equal(narrow.agreement, wide.agreement)
    np.testing.assert_array_equal(narrow.followed[is_place], wide.followed[is_place])

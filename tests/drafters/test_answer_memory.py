"""The memory of earlier answers against a list of them: what it keeps, its order, what it finds."""

import collections
import functools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jspec.drafters.answer_memory import AnswerMemory, forget, remember
from jspec.drafters.corpus import MAX_MATCH, make_corpus
from jspec.drafters.suffix import SuffixDrafter
from tests.drafters.test_prompt_lookup import CAPACITY, as_history
from tests.drafters.test_suffix import agreeing
from tests.drafters.test_suffix_corpus import VOCAB, find, places_of
from tests.speculation import drive

MAX_ANSWERS, ROOM = 3, 24
SIZE = MAX_MATCH + MAX_ANSWERS * (ROOM + MAX_MATCH)
EMPTY = AnswerMemory.empty(MAX_ANSWERS, ROOM)
letters = st.integers(0, 1)
answers_lists = st.lists(
    st.one_of(
        st.lists(letters, max_size=ROOM + 30),
        # The same again, as of requests that are alike.
        st.sampled_from([[0, 1, 1] * 5, [1] * (2 * ROOM), [0, 1, 1] * 40, [3]]),
    ),
    max_size=8,
)


def kept(answers):
    """Returns the newest answers that fit, the oldest first."""
    left = []
    for answer in answers:
        if answer:
            left.append(answer[-(SIZE - 2 * MAX_MATCH) :])
        while len(left) > MAX_ANSWERS or MAX_MATCH + sum(len(a) + MAX_MATCH for a in left) > SIZE:
            del left[0]
    return left


@functools.cache
def _memory_after(answers):
    return _memory_after(answers[:-1]).with_answer(answers[-1]) if answers else EMPTY


def memory_after(answers):
    return _memory_after(tuple(map(tuple, answers)))


@hypothesis.settings(deadline=None, max_examples=50, derandomize=True)
@hypothesis.given(answers=answers_lists)
def test_the_order_is_that_of_a_corpus_sorted_anew(answers):
    """Answer by answer, with those that go and those too long; nothing ever grows."""
    corpus, left = memory_after(answers).corpus, kept(answers)
    assert [leaf.shape for leaf in corpus] == [(SIZE,), (SIZE,), ()]
    num_places = int(corpus.num_sorted)
    if not places_of(left):
        assert num_places == 0
        return
    expected = make_corpus(left, VOCAB)
    tokens = np.asarray(corpus.tokens)
    assert tokens[: len(expected.tokens)].tolist() == expected.tokens.tolist()
    assert (tokens[len(expected.tokens) :] < 0).all()
    assert corpus.order[:num_places].tolist() == expected.order.tolist()


@hypothesis.settings(deadline=None, max_examples=50, derandomize=True)
@hypothesis.given(
    answers=answers_lists,
    rows=st.lists(st.lists(letters, min_size=1, max_size=CAPACITY), min_size=3, max_size=3),
    num_places=st.sampled_from([8, SIZE]),
)
def test_what_is_found_is_what_a_plain_search_finds(answers, rows, num_places):
    """The places that agree longest, as many as are asked for or half of them; all, if all are.

    One array serves all rows.
    """
    actual = find(memory_after(answers).corpus, as_history(rows), num_places)
    places = places_of(kept(answers))
    for row, text in enumerate(rows):
        expected = [
            (length, (after + [-1] * 3)[:3])
            for before, after in places
            if (length := agreeing(before, text)) > 0
        ]
        pairs = zip(actual.agreement[row].tolist(), actual.followed[row].tolist(), strict=True)
        places_found = [(length + 1, tokens) for length, tokens in pairs if length >= 0]
        assert not collections.Counter(map(repr, places_found)) - collections.Counter(
            map(repr, expected)
        )
        for shortest in range(1, MAX_MATCH + 1):
            num_there = sum(length >= shortest for length, _ in expected)
            num_found = sum(length >= shortest for length, _ in places_found)
            assert num_found >= min(num_there, num_places // 2)
        assert num_places < SIZE or len(places_found) == len(expected)


def test_the_oldest_answer_goes():
    """By their number, and by their tokens; and all of them at once."""
    answers = [[0, 1], [1, 0], [2, 2, 1], [3, 3]]
    assert kept(answers) == answers[1:]
    assert 0 not in memory_after(answers[2:]).corpus.tokens.tolist()
    long_answer = [2, 1] * ((SIZE - 2 * MAX_MATCH - 10) // 2)
    params = ((None, memory_after(answers[:3])), {"head": np.zeros(2)})
    for answer, expected in ((long_answer, [long_answer]), ([3, 1], [long_answer[:0], [3, 1]])):
        left = kept([*answers[:3], long_answer, *([answer] if answer != long_answer else [])])
        params = remember(params, answer)
        tokens = params[0][1].corpus.tokens.tolist()
        assert [t for t in tokens if t >= 0] == [t for text in left for t in text]
        assert expected[-1] == left[-1]
    assert int(forget(params)[0][1].corpus.num_sorted) == 0


def propose(memory, history, last, is_free):
    return drive.propose(None, SuffixDrafter(4), (memory,), history, last, is_free=is_free)[0]


@pytest.mark.parametrize("is_free", [[True, True], [True, False], [False, False]])
def test_rows_whose_tokens_depend_on_drafts_look_up_nothing(is_free):
    """Row by row: a seed must give the same text after any other requests."""
    memory = AnswerMemory.empty(MAX_ANSWERS, ROOM).with_answer([3, 1, 2, 0])
    proposal = propose(memory, as_history([[3], [3]]), [1, 1], is_free)
    assert drive.drafts_of(proposal) == [[2, 0] if free else [] for free in is_free]


def test_the_text_itself_comes_before_an_answer_that_agrees_as_long():
    """After [3 1] the text has gone on with 0; an answer must agree by more than a token more."""
    memory = AnswerMemory.empty(MAX_ANSWERS, ROOM)
    history = as_history([[3, 1, 0, 2, 3], [2, 3]])
    first_of = []
    for answer in ([3, 1], [2, 3, 1], [0, 2, 3, 1]):
        answer = [*answer, 2, 2, 2, 2]
        proposal = propose(memory.with_answer(answer), history, [1, 1], True)
        assert proposal.num_tokens.tolist()[1] >= 1, "the other row has nothing of its own"
        assert proposal.tokens[1, 0] == 2
        first_of.append(int(proposal.tokens[0, 0]))
    assert first_of == [0, 0, 2]

"""The corpus of suffix decoding: its order, what is found in it, files, and earlier answers."""

import collections
import functools
import json

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from jspec.common.errors import InputError
from jspec.drafters.corpus import (
    MAX_MATCH,
    AnswerMemory,
    corpus_matches,
    forget,
    load_corpus,
    make_corpus,
    remember,
)
from jspec.drafters.suffix import SuffixDrafter
from jspec.weights.tokenizers.tokenizer import ByteTokenizer
from tests.drafters.test_prompt_lookup import CAPACITY, as_history
from tests.drafters.test_suffix import agreeing
from tests.speculation import drive

VOCAB, WIDTH = 4, 3
TOKENIZER = ByteTokenizer(128, bos_id=1, eos_ids=(0,))


def random_texts(seed, num_texts=12, longest=60):
    """Returns texts of two letters, so that long stretches come again, some of them empty."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 2, n).tolist() for n in rng.integers(0, longest, num_texts)]


def places_of(texts):
    """Returns (what stands up to a place, what follows it) of all places."""
    return [(text[: end + 1], text[end + 1 :]) for text in texts for end in range(len(text) - 1)]


@pytest.mark.parametrize("texts", [random_texts(0), [[3, 0]], [[1] * 100, [], [2], [1] * 40]])
def test_places_are_sorted_by_what_stands_before(texts):
    """The newest token first, `MAX_MATCH` of them; every place with a next token is there once."""
    corpus = make_corpus(texts, VOCAB)
    tokens, order = np.asarray(corpus.tokens), np.asarray(corpus.order)
    keys = [tokens[place - MAX_MATCH + 1 : place + 1][::-1].tolist() for place in order]
    assert keys == sorted(keys)
    assert len(set(order.tolist())) == len(order) == len(places_of(texts))
    assert (tokens[order] >= 0).all()
    assert (tokens[order + 1] >= 0).all()


@functools.cache
def corpus_of(seed):
    return make_corpus(random_texts(seed), VOCAB)


@functools.partial(jax.jit, static_argnames="num_places")
def find(corpus, text, num_places):
    return corpus_matches(corpus, text, num_places=num_places, width=WIDTH)


ends = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=CAPACITY)


@hypothesis.settings(deadline=None, max_examples=50, derandomize=True)
@hypothesis.given(
    rows=st.lists(st.one_of(ends, st.sampled_from(random_texts(0))), min_size=3, max_size=3),
    num_places=st.sampled_from([2, 8, 1000]),
)
def test_the_places_that_agree_longest_are_found(rows, num_places):
    """Of each length as many as there are, or half of those asked; and what followed them."""
    rows = [text[-CAPACITY:] or [0] for text in rows]
    actual = find(corpus_of(0), as_history(rows), num_places)
    for row, text in enumerate(rows):
        expected = {}
        for before, after in places_of(random_texts(0)):
            expected.setdefault(agreeing(before, text), []).append(after[:WIDTH])
        lengths = np.asarray(actual.agreement[row]) + 1
        for shortest in range(1, MAX_MATCH + 1):
            num_there = sum(len(all_) for length, all_ in expected.items() if length >= shortest)
            num_found = int((lengths >= shortest).sum())
            assert min(num_there, num_places // 2) <= num_found <= num_there
        for length, tokens in zip(lengths, actual.followed[row].tolist(), strict=True):
            tokens = tokens[: tokens.index(-1)] if -1 in tokens else tokens
            assert length == 0 or tokens in expected[int(length)]


def test_a_place_is_found_once_and_nothing_agrees_across_texts():
    """Neither before a text's beginning, where both have nothing, nor after its end.

    Guards against counts of one place that the window reads several times, too.
    """
    corpus = make_corpus([[3, 1], [1, 2, 0], [2]], VOCAB)
    actual = find(corpus, as_history([[1], [3, 1], [1, 2]]), 8)
    lengths = np.asarray(actual.agreement) + 1
    places = [
        [(n, *tokens) for n, tokens in zip(*row, strict=True) if n]
        for row in zip(lengths.tolist(), actual.followed.tolist(), strict=True)
    ]
    assert places == [[(1, 2, 0, -1)], [(1, 2, 0, -1)], [(2, 0, -1, -1)]]


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def texts_in(corpus):
    """Returns the texts that a corpus holds."""
    text = "".join(chr(i) if i >= 0 else "|" for i in corpus.tokens[MAX_MATCH:].tolist())
    return text.rstrip("|").split("|" * MAX_MATCH)


def test_files_of_answers_and_texts(tmp_path):
    """Answers without their prompts, texts without BOS; and a plain file as one text."""
    answer = {"prompt_token_ids": [99], "token_ids": [97, 98], "text": "x", "prompt": "y"}
    path = write(tmp_path / "answers.jsonl", answer, {"text": "cde"})
    assert texts_in(load_corpus(path, TOKENIZER, 128)) == ["ab", "cde"]
    plain = tmp_path / "book.txt"
    plain.write_text("one\ntwo")
    assert texts_in(load_corpus(str(plain), TOKENIZER, 128)) == ["one\ntwo"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"token_ids": [1, 128]}', "expected token ids from 0 to 127, got 1 "),
        ("a.jsonl", '{"token_ids": [-1, 5]}', "expected token ids from 0 to 127, got -1"),
        ("a.jsonl", '{"answer": "b"}', ":1: expected token_ids, or a text in text"),
        ("a.jsonl", "{", ":1: .*broken JSON"),
        ("a.jsonl", "", ": expected a text of at least two tokens, got none"),
        ("a.txt", "b", ": expected a text of at least two tokens, got none"),
        ("none/a.txt", None, "cannot read the texts .*none/a.txt: No such file"),
        ("none/a.jsonl", None, "cannot read the input .*none/a.jsonl: No such file"),
        (".", None, "cannot read the texts .*: Is a directory"),
    ],
)  # fmt: skip
def test_files_that_are_no_corpus_are_refused(tmp_path, name, content, message):
    """In one line that names the file."""
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        load_corpus(str(path), TOKENIZER, 128)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


# Earlier answers.

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
    corpus, left = jax.tree.map(np.asarray, memory_after(answers).corpus), kept(answers)
    assert [leaf.shape for leaf in corpus] == [(SIZE,), (SIZE,), ()]
    num_places = int(corpus.num_sorted)
    if not places_of(left):
        assert num_places == 0
        return
    expected = make_corpus(left, VOCAB)
    tokens = corpus.tokens
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


def test_rows_whose_tokens_depend_on_drafts_look_up_nothing():
    """Row by row: a seed must give the same text after any other requests."""
    memory = EMPTY.with_answer([3, 1, 2, 0])
    proposal = propose(memory, as_history([[3], [3]]), [1, 1], [True, False])
    assert drive.drafts_of(proposal) == [[2, 0], []]


def test_the_text_itself_comes_before_an_answer_that_agrees_as_long():
    """After [3 1] the text has gone on with 0; an answer must agree by more than a token more."""
    memory = EMPTY
    history = as_history([[3, 1, 0, 2, 3], [2, 3]])
    first_of = []
    for answer in ([3, 1], [2, 3, 1], [0, 2, 3, 1]):
        answer = [*answer, 2, 2, 2, 2]
        proposal = propose(memory.with_answer(answer), history, [1, 1], True)
        assert proposal.num_tokens.tolist()[1] >= 1, "the other row has nothing of its own"
        assert proposal.tokens[1, 0] == 2
        first_of.append(int(proposal.tokens[0, 0]))
    assert first_of == [0, 0, 2]

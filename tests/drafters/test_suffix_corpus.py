"""The corpus of suffix decoding: its order, the search in it, what it finds, and files of texts."""

import functools
import json

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from jspec.common.errors import InputError
from jspec.drafters.corpus import MAX_MATCH, corpus_matches, load_corpus, make_corpus
from jspec.weights.tokenizers.tokenizer import ByteTokenizer
from tests.drafters.test_prompt_lookup import CAPACITY, as_history
from tests.drafters.test_suffix import agreeing

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


def test_a_place_is_found_once():
    """Guards against counts of one place that the window reads several times."""
    actual = find(make_corpus([[1, 2, 3]], VOCAB), as_history([[1], [0, 1, 2], [3]]), 8)
    lengths = [sorted(row, reverse=True)[:2] for row in (actual.agreement + 1).tolist()]
    assert lengths == [[1, 0], [2, 0], [0, 0]]


def test_nothing_agrees_across_texts():
    """Neither before a text's beginning, where both have nothing, nor after its end."""
    corpus = make_corpus([[3, 1], [1, 2, 0], [2]], VOCAB)
    actual = find(corpus, as_history([[1], [3, 1], [1, 2]]), 8)
    single, after_an_end, joined = (
        {(n, *tokens) for n, tokens in zip(lengths, followed, strict=True) if n}
        for lengths, followed in zip(
            (actual.agreement + 1).tolist(), actual.followed.tolist(), strict=True
        )
    )
    assert single == after_an_end == {(1, 2, 0, -1)}
    assert joined == {(2, 0, -1, -1)}


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

"""A tokenizer learnt from texts."""

import pytest

from jspec.weights.tokenizers.load_tokenizer import load_tokenizer
from jspec.weights.tokenizers.tokenizer import NUM_BYTES, learn_bpe
from jspec.weights.vocabulary import vocabulary_digest
from tests.weights.tokenizers.test_tokenizer import ODD_TEXTS

_TEXTS = ["the cat and the hat", "that is the end of the hat", "then the other"] * 3


def learn(vocab_size):
    return learn_bpe(_TEXTS, vocab_size, bos="<b>", eos="<e>")


@pytest.fixture(scope="module")
def tokenizer():
    return learn(NUM_BYTES + 2 + 12)


def test_frequent_words_are_one_token_and_all_texts_come_back(tokenizer):
    """Guards against a text that cannot be spelt: all bytes are there, seen or not."""
    assert tokenizer.vocab_size == NUM_BYTES + 2 + 12
    assert len(tokenizer.encode(" the", add_bos=False)) == 1
    for text in ODD_TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_ends_are_tokens(tokenizer):
    """A text begins with BOS, and with one only; a written EOS is an EOS."""
    assert tokenizer.encode("") == [tokenizer.bos_id]
    ids = tokenizer.encode("the<e>")
    assert ids[0] == tokenizer.bos_id
    assert (ids[-1],) == tokenizer.eos_ids
    assert len({tokenizer.bos_id, *tokenizer.eos_ids}) == 2


def test_the_same_texts_give_the_same_tokens(tokenizer, tmp_path):
    """Also through a folder; guards against an alphabet in the order of a hash."""
    assert vocabulary_digest(learn(NUM_BYTES + 2 + 12)) == vocabulary_digest(tokenizer)
    tokenizer.save(tmp_path)
    assert vocabulary_digest(load_tokenizer(tmp_path)) == vocabulary_digest(tokenizer)


def test_a_short_text_has_few_pairs():
    """No error and no padding: as many tokens as there are."""
    assert NUM_BYTES + 2 < learn(10_000).vocab_size < NUM_BYTES + 2 + 60

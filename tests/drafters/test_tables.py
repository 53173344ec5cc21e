"""Tables of n-gram counts: counting, the file, and drafters of them and of random tokens."""

import collections
import functools
import itertools
import os

import numpy as np
import pytest
import safetensors.numpy

from jspec.common.errors import InputError
from jspec.drafters import tables as counting
from jspec.drafters.tables import (
    TableDrafter,
    bigram_logits,
    count_ngrams,
    load_table,
    save_table,
    table_params,
    uniform_logits,
    unigram_logits,
)
from jspec.speculation.types import Kind
from jspec.weights.tokenizers.tokenizer import ByteTokenizer
from tests.speculation import drive
from tests.weights.tokenizers.test_tokenizer import make_tokenizer

TEXTS = [np.random.default_rng(i).integers(0, 9, 40 * i).tolist() for i in range(5)]


@pytest.mark.parametrize("merge_at", [1, 1 << 22])
def test_counts_equal_a_plain_count(monkeypatch, merge_at):
    """Pairs do not reach from text to text; equals come in the order of their ids."""
    monkeypatch.setattr(counting, "_MERGE_AT", merge_at)
    table = count_ngrams(TEXTS, 10, num_continuations=3)
    assert table.num_tokens == 400
    tokens = collections.Counter(token for text in TEXTS for token in text)
    assert table.unigrams.tolist() == [tokens[i] for i in range(10)]
    pairs = collections.Counter(pair for text in TEXTS for pair in itertools.pairwise(text))
    for first in range(10):
        followed = [(-pairs[first, second], second) for second in range(10)]
        expected = [(second, -count) for count, second in sorted(followed)[:3] if count]
        actual = zip(table.ids[first].tolist(), table.counts[first].tolist(), strict=True)
        assert [pair for pair in actual if pair[1]] == expected


def test_what_cannot_be_counted_is_refused():
    """Guards against an empty corpus, and ids of another tokenizer."""
    with pytest.raises(InputError, match="at least one token"):
        count_ngrams([[]], 5)
    with pytest.raises(InputError, match="ids from 0 to 4, got 1 to 5"):
        count_ngrams([[1, 5]], 5)


@pytest.mark.parametrize("order", [1, 2])
def test_loading_what_was_saved_is_identity(tmp_path, order):
    """Nothing but the table is left in the folder; an older one is replaced."""
    path = tmp_path / "t.safetensors"
    path.write_text("old")
    table = count_ngrams(TEXTS, 10, order=order)
    save_table(table, path)
    for actual, expected in zip(load_table(str(path)), table, strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert os.listdir(tmp_path) == ["t.safetensors"]
    with safetensors.safe_open(path, "np") as file:
        metadata = file.metadata()
    kind = "unigram" if order == 1 else "unigram+bigram"
    assert (metadata["kind"], metadata["vocab_size"]) == (kind, "10")
    assert metadata["num_tokens"] == "400"


def test_a_table_that_cannot_be_written_leaves_the_old_one(tmp_path):
    """Guards against half a file under the right name."""
    with pytest.raises(InputError, match="cannot be written: No such file"):
        save_table(count_ngrams(TEXTS, 10), tmp_path / "none" / "t")
    (tmp_path / "t").mkdir()
    with pytest.raises(InputError, match="t cannot be written"):
        save_table(count_ngrams(TEXTS, 10), tmp_path / "t")
    assert os.listdir(tmp_path) == ["t"]


def spoilt(table, **changes):
    """Returns a table's tensors, some of them others."""
    return {name: np.asarray(leaf) for name, leaf in (table._asdict() | changes).items()}


@pytest.mark.parametrize(
    ("changes", "metadata", "message"),
    [
        ({}, {"format": "a model"}, "expected a table of n-gram counts, got other tensors"),
        ({}, {"kind": "unigram"}, "expected a table of n-gram counts"),
        ({}, {"vocab_size": "11"}, "unigrams of 11 tokens, got shape"),
        ({}, {"num_tokens": "7"}, "expected 7 counted tokens"),
        ({"unigrams": np.ones(10)}, {}, "whole numbers"),
        ({"unigrams": np.zeros(10, int)}, {"num_tokens": "0"}, "at least one"),
        ({"unigrams": np.arange(-1, 9)}, {}, "at least 0"),
        ({"ids": np.zeros([10, 2], int)}, {}, "ids and counts of one shape"),
        ({"ids": np.full([10, 32], 10)}, {}, "ids below 10, got 10"),
        ({"counts": np.tile(np.arange(32), [10, 1])}, {}, "most frequent bigrams first"),
    ],
)
def test_files_that_are_no_table_are_refused(tmp_path, changes, metadata, message):
    """Guards against ids beyond the vocabulary, which JAX would clamp in silence."""
    path = tmp_path / "t.safetensors"
    good = {"format": "jspec n-gram table", "kind": "unigram+bigram", "vocab_size": "10",
            "num_tokens": "400"}  # fmt: skip
    tensors = spoilt(count_ngrams(TEXTS, 10), **changes)
    safetensors.numpy.save_file(tensors, path, metadata=good | metadata)
    with pytest.raises(InputError, match=message) as caught:
        load_table(str(path))
    assert "\n" not in str(caught.value)


def test_damaged_files_are_refused(tmp_path):
    """Guards against tracebacks of the library that reads them."""
    path = tmp_path / "t.safetensors"
    save_table(count_ngrams(TEXTS, 10), path)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"\xff" * 64):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="truncated or damaged table"):
            load_table(str(path))
    with pytest.raises(InputError, match="none: no such file; expected a table"):
        load_table(str(tmp_path / "none"))
    with pytest.raises(InputError, match="expected a table of n-gram counts, a file; got a folder"):
        load_table(str(tmp_path))


def test_counts_of_another_tokenizer_are_refused(tmp_path):
    """Guards against a table of as many tokens that mean something else."""
    path = tmp_path / "t.safetensors"
    first, second = make_tokenizer(), make_tokenizer(special=("</s>", "<s>"))
    size = first.vocab_size
    save_table(count_ngrams(TEXTS, size), path, first)
    for tokenizer in (first, None, ByteTokenizer(size)):  # bytes are a stand-in: only sizes count
        assert load_table(str(path), tokenizer=tokenizer, vocab_size=size).unigrams.size == size
    with pytest.raises(InputError, match=r"t\.safetensors: expected a table counted with the tar"):
        load_table(str(path), tokenizer=second)
    with pytest.raises(InputError, match=f"vocabulary of {size + 1} tokens, got one of {size}"):
        load_table(str(path), tokenizer=first, vocab_size=size + 1)
    save_table(count_ngrams(TEXTS, size), path)  # of which nobody knows
    assert load_table(str(path), tokenizer=second).unigrams.size == size


# Drafters.

VOCAB, TARGET_VOCAB, WIDTH = 5, 7, 3  # the target's distributions are padded
TEXT = [0, 1, 2, 0, 1, 0, 1, 2, 2, 3]  # 4 never comes, and nothing follows 3
UNIGRAMS = np.array([3, 3, 3, 1, 0]) / 10
BIGRAMS = np.array([[0, 3, 0, 0, 0], [1, 0, 2, 0, 0], [1, 0, 1, 1, 0]]) / 3
DISTRIBUTIONS = {
    "unigram": np.tile(UNIGRAMS, [5, 1]),
    "bigram": np.concatenate([BIGRAMS, UNIGRAMS[None], UNIGRAMS[None]]),
    "random": np.full([5, 5], 0.2),
}
LOGITS = {
    "unigram": unigram_logits,
    "bigram": bigram_logits,
    "random": functools.partial(uniform_logits, vocab_size=VOCAB),
}


@functools.cache
def parameters(name):
    """Returns the drafter's parameters."""
    return None if name == "random" else table_params(count_ngrams([TEXT], VOCAB), name)


def propose(name, last_token, temperature, limit=WIDTH, min_confidence=0.0):
    """Returns the proposal after some tokens."""
    kind, sizes = Kind(name, 0.2, 0.2), (WIDTH, TARGET_VOCAB, TARGET_VOCAB)
    drafter = TableDrafter(*sizes, min_confidence, kind=kind, logits=LOGITS[name])
    proposal, state = drive.propose(
        None, drafter, parameters(name), drafter.init(len(last_token), 16), last_token, limit,
        temperature, seeds=np.arange(len(last_token)),
    )  # fmt: skip
    assert state == ()
    return proposal


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_are_the_counts(name):
    """Of every draft, given the one before; a token that nothing followed falls back."""
    for temperature in (1.0, 0.5):
        proposal = propose(name, np.arange(50) % 5, temperature)
        before = np.concatenate([(np.arange(50) % 5)[:, None], proposal.tokens[:, :-1]], axis=1)
        distribution = DISTRIBUTIONS[name][before] ** (1 / temperature)
        distribution /= distribution.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(proposal.probs[..., :VOCAB], distribution, rtol=1e-5, atol=1e-7)
        assert (np.asarray(proposal.probs)[..., VOCAB:] == 0).all()
        drawn = np.take_along_axis(distribution, np.asarray(proposal.tokens)[..., None], axis=2)
        assert (drawn > 0).all()
        assert (proposal.num_tokens == WIDTH).all()


def test_temperature_zero_says_the_most_likely():
    """Of equals the first, after token 0."""
    for name, chain in (("unigram", [0, 0]), ("bigram", [1, 2])):
        proposal = propose(name, np.arange(50) % 5, 0.0)
        assert proposal.tokens[0, :2].tolist() == chain
        assert proposal.probs[0, 0, chain[0]] == 1


def test_limits_are_kept_and_rows_differ():
    """No more than is wanted; the same token in another row draws for itself."""
    proposal = propose("random", [1] * 50, 1.0, limit=np.arange(50) % 4)
    assert proposal.num_tokens.tolist() == [i % 4 for i in range(50)]
    assert len({tuple(row) for row in proposal.tokens.tolist()}) > 10


def test_an_unsure_row_is_silent():
    """`draft_confidence` looks at each distribution before it is drawn from."""
    proposal = propose("bigram", np.arange(50) % 5, 1.0, min_confidence=0.9)
    assert proposal.num_tokens[:5].tolist() == [1, 0, 0, 0, 0]  # 0 is sure of 1, which is not

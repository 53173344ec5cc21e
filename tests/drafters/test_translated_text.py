"""Texts read and spelt in the tokens of another vocabulary, with tokenizers of every family."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.common.user_cache import cache_dir
from jspec.drafters.translated_text import BLOCK, MOST_JOINED, TranslatedText, spell
from jspec.drafters.vocabulary_map import (
    check_bytes,
    check_shared,
    make_vocabulary_map,
    most_alike,
)
from jspec.kernels import PAGE
from jspec.weights.gguf import GgufFile
from jspec.weights.published import SMOLLM2, fetch
from jspec.weights.tokenizers.gguf_tokenizer import build_tokenizer
from jspec.weights.tokenizers.tokenizer import ByteTokenizer
from tests.cases import slow_unless
from tests.speculation.drive import QUICK
from tests.weights.tokenizer_texts import many_texts
from tests.weights.tokenizers.made import MADE, REAL, load, make

READABLE = ("byte level", "strips", "keeps", "bytes")  # whose tokens stand for all bytes
QWEN = "models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
WIDTH, CAPACITY = 160, 320
TEXTS = [
    "def f(x):\n    return {'a': x ** 2}\n\n\nclass A:\n\tpass\n", " leading and  two  spaces ",
    "12345 6.789", "café naïve 東京 😀 👩‍👩‍👧‍👦", "a\n\n\n  b", "the<|im_end|>\nquick<think>brown",
    "x", "", "\u2581\u2581\u2581 é",
]  # fmt: skip
# Each as target and as draft: what is made of a pair is made of either's bytes alone.
PAIRS = [(a, b) for a, b in itertools.pairwise((*READABLE, READABLE[0]))]
OF_FILES = [("smollm2 file", "qwen file"), ("qwen file", "smollm2 file")]
PUBLISHED = [*OF_FILES, ("smollm2 file", "strips"), ("keeps", "smollm2 file")]
PUBLISHED += [(a, b) for a, b in itertools.pairwise((*REAL, REAL[0]))]
# The third is like the first without spaces that are stripped, and the last without tokens either.
ALL_PAIRS = [slow_unless(pair in PAIRS and pair != PAIRS[2], *pair) for pair in PAIRS + PUBLISHED]


@functools.cache
def tokenizer_of(name):
    """Returns a tokenizer that is made here, or a published one if it is to be had."""
    if name == "smollm2 file":
        return build_tokenizer(GgufFile(fetch(SMOLLM2)))
    if name == "qwen file":
        path = cache_dir() / QWEN
        if not path.is_file():
            pytest.skip(f"expected {path}")
        return build_tokenizer(GgufFile(path))
    return make(name)[0] if name in MADE else load(name)[0]


class Translator:
    """Compiled functions over the texts of one pair, on single rows."""

    def __init__(self, target, draft):
        self.target, self.draft = tokenizer_of(target), tokenizer_of(draft)
        sizes = self.target.vocab_size, self.draft.vocab_size
        self.map, self.reading = make_vocabulary_map(self.target, self.draft, *sizes)
        self.tables = jax.tree.map(jnp.asarray, self.map)
        num_alike = most_alike(self.map.target_table)
        self.empty = TranslatedText.init(1, CAPACITY)

        def append(tables, text, tokens, count):
            text, same = text.append(tables, self.reading, tokens, jnp.arange(WIDTH) < count)
            window = text.window(tables, self.reading, jnp.zeros(1, int), 4 * WIDTH)
            return text, same, window, text.length(self.reading)

        def spelt(tables, tokens, count):
            return spell(tables, tokens, count[0], WIDTH, num_alike)

        self._append, self._spell = (
            jax.jit(function, compiler_options=QUICK) for function in (append, spelt)
        )

    def append(self, text, ids):
        """Appends target tokens; returns the text, how many draft tokens stay, and all of them."""
        text, same, tokens, count = self._append(self.tables, text, *_padded(ids))
        return text, int(same[0]), np.asarray(tokens)[0, : int(count[0])].tolist()

    def read(self, ids):
        """Returns how the draft reads them."""
        return self.append(self.empty, ids)[2]

    def spell(self, ids):
        """Returns draft tokens in the target's."""
        spelt, count = self._spell(self.tables, *_padded(ids))
        return np.asarray(spelt)[0, : int(count[0])].tolist()


def _padded(ids):
    tokens = np.zeros([1, WIDTH], np.int32)
    tokens[0, : len(ids)] = ids
    return tokens, np.array([[len(ids)]], np.int32)


translator = functools.cache(Translator)


def bytes_of(tokenizer, ids):
    """Returns the bytes of tokens as they stand at the beginning of a text."""
    pieces, is_first = [], True
    for token in ids:
        pieces.append(tokenizer.piece(token, is_first))
        is_first = is_first and not tokenizer.piece(token, False)
    return b"".join(pieces)


@pytest.mark.parametrize(("target", "draft"), ALL_PAIRS, ids=str)
def test_the_draft_reads_the_same_text(target, draft):
    """Leading spaces, bytes, specials, digits and half characters: not a byte more or less.

    Texts are also cut off anywhere, so that one may end inside of a character.
    """
    pair = translator(target, draft)
    for text in [*TEXTS, *many_texts(20)]:
        ids = pair.target.encode(text)[:WIDTH]
        for part in (ids, ids[: len(ids) * 2 // 3]):
            actual = pair.read(part)
            expected = bytes_of(pair.target, part)
            named = [pair.map.readings.begins[i + 1] - pair.map.readings.begins[i] for i in part
                     if not pair.target.piece(i, False)]  # fmt: skip
            if all(count == 1 for count in named):  # else their names were written out
                assert bytes_of(pair.draft, actual) == expected, text


@pytest.mark.parametrize(("target", "draft"), [*PAIRS[:2], slow_unless(False, *OF_FILES[0])])
def test_a_reading_does_not_depend_on_the_parts_in_which_a_text_came(target, draft):
    """And what is said to stay the same does: a cache keeps it.

    Guards against tokens joined by what happens to be there: another token may cut those before it
    anew.
    """
    pair, source = translator(target, draft), np.random.default_rng(0)
    ids = pair.target.encode(" ".join(many_texts(40)))[:WIDTH]
    whole, changed = pair.read(ids), 0
    text, begin, before = pair.empty, 0, []
    while begin < len(ids):
        count = int(source.integers(1, 8))
        text, same, tokens = pair.append(text, ids[begin : begin + count])
        begin += count
        assert tokens == pair.read(ids[:begin])
        assert tokens[:same] == before[:same]
        changed += tokens[: len(before)] != before
        before = tokens
    assert tokens == whole
    assert changed > 0, "nothing to prove"


def test_a_text_that_is_cut_short_goes_on_elsewhere():
    """A conversation's next turn begins after what both have in common."""
    pair = translator("strips", "byte level")
    ids, others = (pair.target.encode(text)[:WIDTH] for text in ("the quick " * 20, "over " * 5))
    for length in (1, 3, BLOCK - 1, BLOCK, BLOCK + 7):
        text, _, _ = pair.append(pair.empty, ids)
        history = text.history.replace(length=jnp.array([length], jnp.int32))
        _, same, tokens = pair.append(text.replace(history=history), others)
        expected = pair.read([*ids[:length], *others])
        assert tokens == expected
        assert expected[:same] == pair.read(ids[:length])[:same]


def canonical_share(tokenizer, ids, text):
    """Returns the share of the tokenizer's own tokens of a text that are among those."""

    def spans(ids):
        ends = np.cumsum([len(tokenizer.piece(i, False)) for i in ids])
        return set(itertools.pairwise([0, *ends.tolist()]))

    actual = spans(tokenizer.encode(text, add_bos=False))
    return len(actual & spans(ids)) / len(actual)


CODE = '''def below_threshold(numbers: list[float], threshold: float) -> bool:
    """Returns whether all numbers are below the threshold, 0.25 by default."""
    for index, number in enumerate(numbers):
        if number >= threshold:
            return False
    return True


print(below_threshold([0.5, 2.75], threshold=3))
'''


@pytest.mark.slow
@pytest.mark.parametrize(("target", "draft"), OF_FILES)
def test_tokens_are_nearly_those_that_their_tokenizer_would_make(target, draft):
    """Neighbours are joined, as a model seldom saw words cut by another tokenizer.

    And the target would refuse its own words. Token by token it is 0.83 and 0.90.
    """
    pair = translator(target, draft)
    ids = pair.read(pair.target.encode(CODE, add_bos=False))
    assert canonical_share(pair.draft, ids, CODE) > 0.9
    ids = pair.spell(pair.draft.encode(CODE, add_bos=False))
    assert canonical_share(pair.target, ids, CODE) > 0.93


@pytest.mark.parametrize(("target", "draft"), ALL_PAIRS, ids=str)
def test_a_spelling_is_the_same_text(target, draft):
    """Up to a draft token that the target cannot write; a draft may end inside of a character."""
    pair = translator(target, draft)
    for text in [*TEXTS, *many_texts(10)]:
        ids = pair.draft.encode(text, add_bos=False)[: WIDTH - 3]
        ids = ids[: len(ids) * 3 // 4]
        is_writable = np.diff(pair.map.spellings.begins) > 0
        writable = list(itertools.takewhile(is_writable.__getitem__, ids))
        written = pair.spell(ids)
        actual, expected = (
            b"".join(tokenizer.piece(i, False) for i in part)
            for tokenizer, part in ((pair.target, written), (pair.draft, writable))
        )
        assert actual == expected if len(written) < WIDTH else expected.startswith(actual)


def test_words_of_several_draft_tokens_become_one_of_the_target():
    """Up to the most that are looked at together."""
    pair = translator("byte level", "bytes")
    words = pair.target.token_bytes()
    word = max((word for word in words if len(word) <= MOST_JOINED), key=len)
    assert len(word) > 3
    assert pair.spell(list(word)) == [words.index(word)]


@pytest.mark.parametrize(("target", "draft"), ALL_PAIRS, ids=str)
def test_shared_tokens_are_pairs_of_the_same_bytes(target, draft):
    """No token twice: the distribution over them would count it twice."""
    pair = translator(target, draft)
    ours, theirs = pair.map.shared_target, pair.map.shared_draft
    assert len(set(ours.tolist())) == len(set(theirs.tolist())) == len(ours) > 0
    assert (np.diff(ours) > 0).all()
    for i, j in zip(ours.tolist(), theirs.tolist(), strict=True):
        assert pair.target.piece(i, False) == pair.draft.piece(j, False)
    # An end of the draft's texts is an end of the target's, while both have some left.
    left = {*pair.target.eos_ids} - {*ours.tolist()}, {*pair.draft.eos_ids} - {*theirs.tolist()}
    assert not all(left)


def test_a_tokenizer_that_cannot_tell_its_bytes_is_refused():
    """One line. Words that it does not know have no bytes either."""
    for name in ("unigram", "wordpiece", "words", "suffixes"):
        with pytest.raises(InputError, match=r"^the draft.s tokenizer does not tell the bytes"):
            check_bytes("draft", tokenizer_of(name))
    for name in READABLE:  # a check that refuses what would work
        check_bytes("draft", tokenizer_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2 file", "qwen file", *REAL])
def test_a_published_tokenizer_is_taken(name):
    """Guards against a check that refuses what would work."""
    check_bytes("draft", tokenizer_of(name))


def test_a_tiny_intersection_is_refused():
    """One line with the number: nothing worth drawing from is left."""
    pair = ByteTokenizer(256), tokenizer_of("byte level")
    mapped, _ = make_vocabulary_map(*pair, 256, pair[1].vocab_size)
    check_shared(mapped)
    only = mapped._replace(shared_target=mapped.shared_target[:0])
    with pytest.raises(
        InputError, match=r"share at least 12 tokens, got 0 of the target's 256 and"
    ):
        check_shared(only)


def test_pages_are_whole_blocks():
    """The server shares what reading a page has made, and no later token may change it."""
    assert PAGE % BLOCK == 0

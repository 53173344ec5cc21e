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
ALL_PAIRS = [*PAIRS, *(slow_unless(False, *pair) for pair in PUBLISHED)]


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
        self._append = jax.jit(
            lambda tables, text, tokens, valid: text.append(tables, self.reading, tokens, valid),
            compiler_options=QUICK,
        )
        self._window = jax.jit(
            lambda tables, text: text.window(tables, self.reading, jnp.zeros(1, int), 4 * WIDTH),
            compiler_options=QUICK,
        )
        self._spell = jax.jit(
            lambda tables, tokens, count: spell(tables, tokens, count, WIDTH, num_alike),
            compiler_options=QUICK,
        )

    def append(self, text, ids):
        """Appends target tokens; returns the text and the number of draft tokens that stay."""
        tokens = np.zeros([1, WIDTH], np.int32)
        tokens[0, : len(ids)] = ids
        valid = np.arange(WIDTH)[None] < len(ids)
        text, same = self._append(self.tables, text, tokens, valid)
        return text, int(same[0])

    def read(self, ids):
        """Returns how the draft reads them."""
        return self.tokens(self.append(TranslatedText.init(1, CAPACITY), ids)[0])

    def tokens(self, text):
        """Returns a text's draft tokens."""
        count = int(text.length(self.reading)[0])
        return np.asarray(self._window(self.tables, text))[0, :count].tolist()

    def spell(self, ids):
        """Returns draft tokens in the target's."""
        tokens = np.zeros([1, WIDTH], np.int32)
        tokens[0, : len(ids)] = ids
        spelt, count = self._spell(self.tables, tokens, np.array([len(ids)], np.int32))
        return np.asarray(spelt)[0, : int(count[0])].tolist()


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
    text, begin, before = TranslatedText.init(1, CAPACITY), 0, []
    while begin < len(ids):
        count = int(source.integers(1, 8))
        text, same = pair.append(text, ids[begin : begin + count])
        begin += count
        tokens = pair.tokens(text)
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
        text, _ = pair.append(TranslatedText.init(1, CAPACITY), ids)
        history = text.history.replace(length=jnp.array([length], jnp.int32))
        text, same = pair.append(text.replace(history=history), others)
        expected = pair.read([*ids[:length], *others])
        assert pair.tokens(text) == expected
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


@pytest.mark.parametrize("name", ["unigram", "wordpiece", "words", "suffixes"])
def test_a_tokenizer_that_cannot_tell_its_bytes_is_refused(name):
    """One line. Words that it does not know have no bytes either."""
    with pytest.raises(InputError, match=r"^the draft.s tokenizer does not tell the bytes"):
        check_bytes("draft", tokenizer_of(name))


@pytest.mark.parametrize(
    "name",
    [*READABLE, *(slow_unless(False, name) for name in ("smollm2 file", "qwen file", *REAL))],
)
def test_a_tokenizer_that_can_tell_its_bytes_is_taken(name):
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

"""Texts in which the end of another text is looked up: sorted by what stands before each place.

    texts                a b c d - x b c e -       between two of them as much as is compared
    sorted, last first   a | x | b a | b x | c b a | c b x | ...

The places that agree longest with a text's end are neighbours of where the end itself would stand
in this order: a suffix array of the reversed texts. A search with 15 pivots at a time finds it in a
few dependent reads; nothing is copied back to the host.

Earlier answers of a run or a server are a corpus of a fixed size among the drafter's parameters,
which every compiled round is given, shared by all rows. When an answer ends, the host makes a new
corpus, which the next round gets.

    tokens   - answer 3 - answer 4 - answer 5 - ........     room for `max_answers` x 1024 tokens
    order    the places of all answers, sorted               those of a new answer are merged in

The oldest answers go as soon as there are too many, or too many tokens. Places of the others stay
in their order, as each place is sorted by its own text alone. So adding an answer of n tokens
sorts n places, searches for each of them in the order, and copies the rest.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int, Int32

from jspec.common.errors import InputError, prefixed_errors
from jspec.common.typing import Params
from jspec.drafters.memory import History
from jspec.drafters.prompt_lookup import Matches
from jspec.drafters.token_texts import is_json_lines, read_plain, read_token_texts
from jspec.weights import TokenizerLike

MAX_MATCH = 16  # tokens that are compared; a power of two
BETWEEN = -1  # stands between texts, `MAX_MATCH` times, and agrees with nothing
TOKENS_AN_ANSWER = 1024  # for which there is room; a shorter answer leaves it to others
_BRANCHES = 16  # of the search
_Ids = Int[np.ndarray, "_"]


class Corpus(NamedTuple):
    """The texts and the order of their places.

    Attributes:
      tokens: all texts, with `MAX_MATCH` negative ids before the first and after every text.
      order: the places that are followed by a token of the same text, sorted; then anything.
      num_sorted: how many places there are.
    """

    tokens: Int32[Array, "n"]
    order: Int32[Array, "p"]
    num_sorted: Int32[Array, ""]


def load_corpus(path: str, tokenizer: TokenizerLike, vocab_size: int) -> Corpus:
    """Reads texts: a JSONL file of answers or texts, see `read_token_texts`, or one plain text.

    Prompts that stand beside answers are left out: they are not what the target says.

    Raises:
      InputError: an unreadable file, one without two tokens in a row, or an id that is none.
    """
    if is_json_lines(path):
        texts = list(read_token_texts(path, tokenizer, with_prompts=False))
    else:
        texts = [tokenizer.encode(read_plain(path), add_bos=False)]
    with prefixed_errors(path):
        return make_corpus(texts, vocab_size)


def make_corpus(texts: Iterable[Sequence[int]], vocab_size: int) -> Corpus:
    """Sorts the places of texts, in numpy: about two seconds for a million tokens.

    Raises:
      InputError: no text of two tokens, or an id outside the vocabulary.
    """
    # As much as is compared, so that each place is sorted by its own text alone.
    between = np.full(MAX_MATCH, BETWEEN, np.int64)
    parts = [between]
    for text in texts:
        if len(text) and not 0 <= min(text) <= max(text) < vocab_size:
            raise InputError(
                f"expected token ids from 0 to {vocab_size - 1}, got {min(text)} to {max(text)}"
            )
        parts += [np.asarray(text, np.int64), between]
    tokens = np.concatenate(parts)
    is_place = np.append((tokens[:-1] >= 0) & (tokens[1:] >= 0), False)
    if not is_place.any():
        raise InputError("expected a text of at least two tokens, got none")
    order = np.argsort(_ranks(tokens), kind="stable")
    order = order[is_place[order]]
    return as_corpus(tokens, order, len(order))


def as_corpus(tokens: Int[np.ndarray, "n"], order: Int[np.ndarray, "p"], num_sorted: int) -> Corpus:
    """Returns a corpus on the device, of its fields in numpy."""
    return Corpus(*(jnp.asarray(field, jnp.int32) for field in (tokens, order, num_sorted)))


def _ranks(tokens: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """Returns the rank of each place by its `MAX_MATCH` last tokens, the newest first."""
    ranks, length = tokens - BETWEEN, 1
    while length < MAX_MATCH:  # the ranks by some tokens give those by twice as many
        before = np.concatenate([np.zeros(length, np.int64), ranks[:-length]])
        pairs = ranks * (ranks.max() + 1) + before
        ranks = np.unique(pairs, return_inverse=True)[1]
        length *= 2
    return ranks


def corpus_matches(corpus: Corpus, text: History, *, num_places: int, width: int) -> Matches:
    """Returns the places of the corpus that agree longest with each text's end, some that do not.

    There are `num_places`; of more that agree equally long, neighbours in the order. They are
    trusted one token less than places in the text itself.
    """
    slots = text.length[:, None] - 1 - jnp.arange(MAX_MATCH)
    end = jnp.take_along_axis(text.tokens, slots, axis=1, mode="clip")
    end = jnp.where(slots >= 0, end, BETWEEN)
    begin = _search(corpus, end) - num_places // 2
    begin = jnp.clip(begin, 0, jnp.maximum(corpus.num_sorted - num_places, 0))
    index = begin[:, None] + jnp.arange(num_places)
    place = corpus.order.at[index].get(mode="clip")
    before = _ending(corpus, place)
    # Before the beginning of a text nothing agrees, whatever the other text has there.
    agrees = (before == end[:, None]) & (before >= 0)
    length = jnp.cumprod(agrees, axis=2, dtype=jnp.int32).sum(axis=2, dtype=jnp.int32)
    followed = corpus.tokens.at[place[..., None] + 1 + jnp.arange(width)].get(mode="clip")
    # After the end of a text there is nothing, though another text begins there.
    is_text = jnp.cumprod(followed >= 0, axis=2, dtype=jnp.int32) > 0
    agreement = jnp.where(index < corpus.num_sorted, length, 0) - 1
    return Matches(agreement, jnp.where(is_text, followed, BETWEEN))


def _ending(corpus: Corpus, place: Int32[Array, "b m"]) -> Int32[Array, "b m l"]:
    """Returns the tokens up to places of the corpus, the newest first."""
    # The ids before the first text leave room for the oldest.
    return corpus.tokens[jnp.maximum(place[..., None] - jnp.arange(MAX_MATCH), 0)]


def _search(corpus: Corpus, end: Int32[Array, "b l"]) -> Int32[Array, "b"]:
    """Returns how many places come before each end in the order."""
    step = _BRANCHES
    while step <= len(corpus.order):
        step *= _BRANCHES
    number = jnp.zeros(end.shape[:1], jnp.int32)
    while step > 1:  # the number sought is from `found` on, and less than `step` above it
        step //= _BRANCHES
        pivot = number[:, None] + step * jnp.arange(1, _BRANCHES) - 1
        place = corpus.order.at[pivot].get(mode="clip")
        is_before = _comes_before(_ending(corpus, place), end[:, None])
        is_before &= pivot < corpus.num_sorted
        number += step * jnp.sum(is_before, axis=1, dtype=jnp.int32)
    return number


def _comes_before(first: Any, second: Any, xp: Any = jnp) -> Any:
    """Returns where one sequence comes before another, [... l]: by the first token that differs."""
    place = xp.argmax(first != second, axis=-1)[..., None]
    return (xp.take_along_axis(first - second, place, axis=-1) < 0)[..., 0]


class AnswerMemory(struct.PyTreeNode):
    """The newest answers.

    Attributes:
      corpus: they themselves, in the order in which they ended; its arrays have a fixed size.
      max_answers: how many there may be.
    """

    corpus: Corpus
    max_answers: int = struct.field(pytree_node=False)

    @classmethod
    def empty(cls, max_answers: int, tokens_an_answer: int = TOKENS_AN_ANSWER) -> Self:
        """Returns a memory without answers."""
        return cls(_nothing(MAX_MATCH + max_answers * (tokens_an_answer + MAX_MATCH)), max_answers)

    def cleared(self) -> Self:
        """Returns a memory of the same size without answers."""
        return self.replace(corpus=_nothing(len(self.corpus.tokens)))

    def with_answer(self, token_ids: Sequence[int]) -> Self:
        """Returns it with one answer more, and without the oldest ones if need be.

        Of one that is longer than the whole memory the end is kept.
        """
        size = len(self.corpus.tokens)
        answer = np.asarray(token_ids, np.int32)[-(size - 2 * MAX_MATCH) :]
        if not len(answer):
            return self
        old = np.asarray(self.corpus.tokens)
        order = np.asarray(self.corpus.order)[: int(self.corpus.num_sorted)]
        begin, end = self._kept(old, len(answer))
        tokens = np.full_like(old, BETWEEN)
        tokens[: end - begin] = old[begin:end]
        first = end - begin
        tokens[first : first + len(answer)] = answer
        order = order[order >= begin] - begin
        order = _merged(tokens, order, first + np.arange(len(answer) - 1))
        padded = np.zeros(size, np.int32)
        padded[: len(order)] = order
        return self.replace(corpus=as_corpus(tokens, padded, len(order)))

    def _kept(self, tokens: _Ids, num_new: int) -> tuple[int, int]:
        """Returns where the tokens to keep begin and end, if an answer of this many comes."""
        is_text = np.pad(tokens >= 0, 1).astype(np.int8)
        edges = np.flatnonzero(np.diff(is_text)).reshape(-1, 2)  # of each answer
        end = MAX_MATCH + (edges[-1, 1] if len(edges) else 0)
        # Where the kept answers begin if 0, 1, 2 ... of the oldest are dropped.
        begins = np.append(edges[:, 0], end) - MAX_MATCH
        is_few = len(edges) - np.arange(len(begins)) < self.max_answers
        is_short = end - begins + num_new + MAX_MATCH <= len(tokens)
        return int(begins[np.argmax(is_few & is_short)]), int(end)


def _nothing(size: int) -> Corpus:
    return as_corpus(np.full(size, BETWEEN), np.zeros(size, np.int32), 0)


def _merged(tokens: _Ids, order: _Ids, places: _Ids) -> _Ids:
    """Returns sorted places with new ones, which come after their equals."""
    endings = tokens[places[:, None] - np.arange(MAX_MATCH)]  # the newest first
    by_ending = np.lexsort(endings.T[::-1])
    places, endings = places[by_ending], endings[by_ending]
    low, high = np.zeros_like(places), np.full_like(places, len(order))
    while (is_open := low < high).any():  # all of them at once, each between its bounds
        middle = (low + high) // 2
        pivots = tokens[order[np.minimum(middle, len(order) - 1)][:, None] - np.arange(MAX_MATCH)]
        is_lower = _comes_before(endings, pivots, np)
        high = np.where(is_open & is_lower, middle, high)
        low = np.where(is_open & ~is_lower, middle + 1, low)
    return np.insert(order, low, places)


def remember(params: Params, token_ids: Sequence[int]) -> Params:
    """Returns a drafter's parameters after an answer."""
    return _with_memories(params, lambda memory: memory.with_answer(token_ids))


def forget(params: Params) -> Params:
    """Returns a drafter's parameters without earlier answers."""
    return _with_memories(params, AnswerMemory.cleared)


def _with_memories(params: Params, change: Any) -> Params:
    def is_memory(part: Any) -> bool:
        return isinstance(part, AnswerMemory)

    return jax.tree.map(
        lambda part: change(part) if is_memory(part) else part, params, is_leaf=is_memory
    )

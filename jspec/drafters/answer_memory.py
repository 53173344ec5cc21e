"""Earlier answers of a run or a server, in which all rows look up how their texts go on.

The answers are a `Corpus` of a fixed size among the drafter's parameters, which every compiled
round is given, shared by all rows. When an answer ends, the host makes a new corpus, which the next
round gets.

    tokens   - answer 3 - answer 4 - answer 5 - ........     room for `max_answers` x 1024 tokens
    order    the places of all answers, sorted               those of a new answer are merged in

The oldest answers go as soon as there are too many, or too many tokens. Places of the others stay
in their order, as each place is sorted by its own text alone. So adding an answer of n tokens
sorts n places, searches for each of them in the order, and copies the rest.
"""

from collections.abc import Sequence
from typing import Any, Self

import jax
import numpy as np
from flax import struct
from jaxtyping import Int

from jspec.common.typing import Params
from jspec.drafters.corpus import BETWEEN, MAX_MATCH, Corpus, as_corpus

TOKENS_AN_ANSWER = 1024  # for which there is room; a shorter answer leaves it to others
_Ids = Int[np.ndarray, "_"]


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
    endings = _endings(tokens, places)
    by_ending = np.lexsort(endings.T[::-1])
    places, endings = places[by_ending], endings[by_ending]
    low, high = np.zeros_like(places), np.full_like(places, len(order))
    while (is_open := low < high).any():  # all of them at once, each between its bounds
        middle = (low + high) // 2
        pivots = _endings(tokens, order[np.minimum(middle, len(order) - 1)])
        is_lower = _comes_before(endings, pivots)
        high = np.where(is_open & is_lower, middle, high)
        low = np.where(is_open & ~is_lower, middle + 1, low)
    return np.insert(order, low, places)


def _endings(tokens: _Ids, places: _Ids) -> Int[np.ndarray, "n l"]:
    """Returns the tokens up to places, the newest first."""
    return tokens[places[:, None] - np.arange(MAX_MATCH)]


def _comes_before(first: Int[np.ndarray, "n l"], second: Int[np.ndarray, "n l"]) -> np.ndarray:
    """Returns where one sequence comes before another, [n]: by the first token that differs."""
    place = np.argmax(first != second, axis=1)[:, None]
    return (np.take_along_axis(first - second, place, axis=1) < 0)[:, 0]


def remember(params: Params, token_ids: Sequence[int]) -> Params:
    """Returns a drafter's parameters after an answer."""
    return _with_memories(params, lambda memory: memory.with_answer(token_ids))


def forget(params: Params) -> Params:
    """Returns a drafter's parameters without earlier answers."""
    return _with_memories(params, AnswerMemory.cleared)


def _with_memories(params: Params, change: Any) -> Params:
    def changed(part: Any) -> Any:
        return change(part) if _is_memory(part) else part

    return jax.tree.map(changed, params, is_leaf=_is_memory)


def _is_memory(part: Any) -> bool:
    return isinstance(part, AnswerMemory)

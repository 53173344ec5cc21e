"""Counting n-grams of token ids."""

from collections.abc import Iterable, Sequence

import numpy as np

from jspec.common.errors import InputError
from jspec.drafters.ngram_table import NgramTable

_MERGE_AT = 1 << 22  # pairs that are held before they are merged into counts


def count_ngrams(
    texts: Iterable[Sequence[int]], vocab_size: int, *, order: int = 2, num_continuations: int = 32
) -> NgramTable:
    """Counts the tokens of texts, and what follows what within each.

    Args:
      texts: token ids.
      vocab_size: ids are below it.
      order: 1 counts unigrams only, 2 bigrams as well.
      num_continuations: how many of the tokens that followed one are kept; of equals the smaller
        ids.

    Raises:
      InputError: no token at all, or an id beyond the vocabulary.
    """
    unigrams = np.zeros(vocab_size, np.int64)
    pairs = _PairCounts(vocab_size)
    for text in texts:
        ids = np.asarray(text, np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise InputError(
                f"expected token ids from 0 to {vocab_size - 1}, got {ids.min()} to {ids.max()}"
            )
        unigrams += np.bincount(ids, minlength=vocab_size)
        if order > 1:
            pairs.add(ids)
    if not unigrams.any():
        raise InputError("expected at least one token to count, got none")
    if order == 1:
        return NgramTable(unigrams)
    return NgramTable(unigrams, *pairs.most_frequent(num_continuations))


class _PairCounts:
    """How often each pair of neighbours came; a pair is the number first · v + second."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._pairs, self._counts = np.zeros([2, 0], np.int64)
        self._new: list[np.ndarray] = []
        self._num_new = 0

    def add(self, ids: np.ndarray) -> None:
        """Counts the pairs of a text."""
        # One number a pair makes counting a sort of numbers.
        self._new.append(ids[:-1] * self._vocab_size + ids[1:])
        self._num_new += len(ids)
        if self._num_new >= _MERGE_AT:
            self._merge()

    def _merge(self) -> None:
        ones = np.ones(sum(map(len, self._new)), np.int64)
        self._pairs, place = np.unique(
            np.concatenate([self._pairs, *self._new]), return_inverse=True
        )
        counts = np.zeros(len(self._pairs), np.int64)
        # `add.at`: plain indexing would count a repeated place once.
        np.add.at(counts, place, np.concatenate([self._counts, ones]))
        self._counts, self._new, self._num_new = counts, [], 0

    def most_frequent(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns what followed each token most often, and how often, [v number] each."""
        self._merge()
        first, second = np.divmod(self._pairs, self._vocab_size)
        # By first token, then the most frequent, then the smaller id.
        order = np.lexsort((second, -self._counts, first))
        first, second, counts = first[order], second[order], self._counts[order]
        # Position among the pairs with the same first token.
        rank = np.arange(len(first)) - np.searchsorted(first, first)
        is_kept = rank < number
        ids = np.zeros([self._vocab_size, number], np.int32)
        table = np.zeros([self._vocab_size, number], np.int64)
        ids[first[is_kept], rank[is_kept]] = second[is_kept]
        table[first[is_kept], rank[is_kept]] = counts[is_kept]
        return ids, table

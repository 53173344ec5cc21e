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
    unigrams, counts, new = np.zeros(vocab_size, np.int64), np.zeros([2, 0], np.int64), []
    num_new = 0
    for text in texts:
        ids = np.asarray(text, np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise InputError(
                f"expected token ids from 0 to {vocab_size - 1}, got {ids.min()} to {ids.max()}"
            )
        unigrams += np.bincount(ids, minlength=vocab_size)
        if order > 1:
            # One number a pair makes counting a sort of numbers.
            new.append(ids[:-1] * vocab_size + ids[1:])
            num_new += len(ids)
        if num_new >= _MERGE_AT:
            counts, new, num_new = _merge(counts, new), [], 0
    if not unigrams.any():
        raise InputError("expected at least one token to count, got none")
    if order == 1:
        return NgramTable(unigrams)
    return NgramTable(unigrams, *_most_frequent(_merge(counts, new), vocab_size, num_continuations))


def _merge(counts: np.ndarray, new: Sequence[np.ndarray]) -> np.ndarray:
    """Adds pairs to counts, which are rows of each pair, once, and how often it came."""
    ones = np.ones(sum(map(len, new)), np.int64)
    pairs, place = np.unique(np.concatenate([counts[0], *new]), return_inverse=True)
    total = np.zeros(len(pairs), np.int64)
    # `add.at`: plain indexing would count a repeated place once.
    np.add.at(total, place, np.concatenate([counts[1], ones]))
    return np.stack([pairs, total])


def _most_frequent(
    counts: np.ndarray, vocab_size: int, number: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what followed each token most often, and how often, [v number] each."""
    first, second = np.divmod(counts[0], vocab_size)
    # By first token, then the most frequent, then the smaller id.
    order = np.lexsort((second, -counts[1], first))
    first, second, times = first[order], second[order], counts[1][order]
    # Position among the pairs with the same first token.
    rank = np.arange(len(first)) - np.searchsorted(first, first)
    is_kept = rank < number
    ids = np.zeros([vocab_size, number], np.int32)
    table = np.zeros([vocab_size, number], np.int64)
    ids[first[is_kept], rank[is_kept]] = second[is_kept]
    table[first[is_kept], rank[is_kept]] = times[is_kept]
    return ids, table

"""Rows of texts: what is trained on, in which order, and what each token sees."""

import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.training.packing import Batches, compute_by_text, iterate_rows, pack, take_by_text
from jspec.training.texts import Text

TEXTS = [Text((1, 2, 3), (4, 5)), Text((6,), (7, 8, 9, 10)), Text((11, 12), (13,) * 9)]


def test_texts_stand_one_behind_another_and_the_last_is_cut():
    rows = pack(TEXTS, 16)
    np.testing.assert_array_equal(
        rows.tokens, [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 0, 0, 0, 0, 0],
                      [11, 12, *[13] * 9, 0, 0, 0, 0, 0]],
    )  # fmt: skip
    np.testing.assert_array_equal(rows.text[0], [1] * 5 + [2] * 5 + [0] * 6)
    np.testing.assert_array_equal(rows.positions[0], [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, *[0] * 6])
    np.testing.assert_array_equal(np.flatnonzero(rows.is_answer[0]), [3, 4, 6, 7, 8, 9])
    cut = pack([Text((1,), tuple(range(2, 40)))], 12)
    np.testing.assert_array_equal(cut.tokens, [range(1, 13)])


def test_batches_follow_from_the_seed_and_their_number():
    """Whatever was asked for before; every epoch has its own order."""
    texts = [Text((i,), (i,) * 7) for i in range(1, 33)]
    options = {"batch_size": 2, "seq_len": 17}
    batches, again = (Batches(texts, seed=3, **options) for _ in range(2))
    assert batches.num_batches == 8
    wanted = [batches[index].tokens for index in range(20)]
    for index in (19, 3, 8, 0):
        np.testing.assert_array_equal(again[index].tokens, wanted[index])
    epochs = [np.concatenate(wanted[first : first + 8]) for first in (0, 8)]
    assert (epochs[0] != epochs[1]).any()
    assert sorted(np.unique(epochs[0])) == sorted(np.unique(epochs[1])) == list(range(33))
    assert (Batches(texts, seed=4, **options)[0].tokens != wanted[0]).any()


def test_an_order_that_is_packed_more_tightly_is_not_cut_short():
    """Where an epoch is one batch, it has every text once, if need be as the first epoch did."""
    texts = [Text((), (n,) * n) for n in (1, 2, 6, 7)]  # 2 rows of 8 tokens, or 3
    num_tried = 0
    for seed in range(20):
        try:
            batches = Batches(texts, batch_size=3, seq_len=8, seed=seed)
        except InputError:  # the first epoch is one of 2 rows
            continue
        first, *later = (batches[index].tokens for index in range(12))
        for tokens in later:
            np.testing.assert_array_equal(np.sort(tokens, axis=None), np.sort(first, axis=None))
        num_tried += 1
    assert num_tried > 0


def test_too_few_texts_are_refused():
    with pytest.raises(InputError, match="got 2: more texts, or a smaller batch_size or seq_len"):
        Batches(TEXTS, batch_size=9, seq_len=16, seed=0)


def test_the_last_batch_is_filled_with_nothing():
    """No text is scored twice."""
    rows = pack([Text((1,), (2,) * 9)] * 3, 10)
    batches = list(iterate_rows(rows, 2))
    assert [batch.tokens.shape for batch in batches] == [(2, 10)] * 2
    assert not batches[1].is_answer[1].any()
    assert sum(batch.is_answer.sum() for batch in batches) == 27


def test_tokens_see_their_own_text_and_are_scored_in_it():
    """By hand: [1 2 3 4 5] [6 7 8 9 10], answers from 4 and from 7 on."""
    rows = pack(TEXTS[:2], 12)
    visible = np.asarray(rows.visible())[0]
    np.testing.assert_array_equal(np.flatnonzero(visible[7]), [5, 6, 7])
    np.testing.assert_array_equal(np.flatnonzero(rows.is_scored(1)[0]), [2, 3, 5, 6, 7, 8])
    np.testing.assert_array_equal(np.flatnonzero(rows.is_scored(2)[0]), [1, 2, 5, 6, 7])


def test_what_was_computed_once_is_found_wherever_a_text_is():
    """Whatever the order and the rows; padding is 0, and longer texts are cut."""
    texts = [*TEXTS, Text((), ()), Text((1,), (2,) * 20)]
    by_text = compute_by_text(lambda rows: rows.tokens * 2, texts, seq_len=11, batch_size=3)
    rows = pack(texts[::-1], 11)
    np.testing.assert_array_equal(take_by_text(by_text, rows), rows.tokens * 2)

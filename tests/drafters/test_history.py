"""The committed tokens that drafters look back at."""

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.memory import History


def make_history(rows, capacity=8):
    tokens = np.zeros([len(rows), capacity], np.int32)
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = text
    return History(jnp.asarray(tokens), jnp.asarray([len(text) for text in rows], jnp.int32))


def texts(history):
    return [
        row[:length]
        for row, length in zip(history.tokens.tolist(), history.length.tolist(), strict=True)
    ]


def valid(counts, width):
    return jnp.arange(width) < jnp.array(counts)[:, None]


def test_each_row_appends_its_own_number_of_tokens():
    """What is not valid leaves no trace, in length or in what is appended next."""
    history = make_history([[1], [2, 3], []])
    history = history.append(jnp.array([[4, 5, 6]] * 3), valid([3, 0, 1], 3))
    assert texts(history) == [[1, 4, 5, 6], [2, 3], [4]]
    history = history.append(jnp.array([[7]] * 3), valid([1, 1, 0], 1))
    assert texts(history) == [[1, 4, 5, 6, 7], [2, 3, 7], [4]]


def test_a_full_row_keeps_what_it_has():
    """A write past the end is dropped, not moved onto the tokens before it."""
    history = make_history([[1, 2, 3], [1]], capacity=4)
    history = history.append(jnp.array([[8, 9, 9]] * 2), valid([3, 3], 3))
    assert history.tokens.tolist() == [[1, 2, 3, 8], [1, 8, 9, 9]]


def test_windows_begin_anywhere():
    """One start a row."""
    history = make_history([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert history.window(jnp.array([0, 2]), 2).tolist() == [[1, 2], [7, 8]]


@pytest.mark.parametrize("text", [[5], [1, 2, 3], list(range(8))], ids=len)
def test_newest_is_the_last_committed_token(text):
    """Up to a full row."""
    assert make_history([text]).newest().tolist() == [text[-1]]

"""Where the last tokens of a text agree with the text's end, and what followed there.

    place       0  1  2  3  4  5  6  7  8
    window      a  b  c  x  b  c  y  b  c   the text's last tokens; it goes on with ...?
    lengths     0  1  2  0  1  2  0  1      tokens that agree with the end, up to each place
    followed    b  c  x  b  c  y  b  c      after [b c] x came once, and y once, more recently

Everything is linear in the window: one more token of the text, or of the drafts that shall follow
it, lengthens each match or ends it, and equal continuations are counted in a table of the window's
size.
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.typing import RowCounts, RowTokens
from jspec.drafters.memory import History

_NO_TEXT = -1


class Window(struct.PyTreeNode):
    """The last u tokens of each text, and what follows each of the p = u - 1 places before."""

    tokens: Int32[Array, "b u"]  # ending with the newest; negative before the text's beginning
    followed: Int32[Array, "b p"]  # the token after each place
    label: Int32[Array, "b p"]  # of that token, a number below u that equal tokens share


def last_window(history: History, last_token: RowTokens, width: int, vocab_size: int) -> Window:
    """Returns the last `width` tokens, at least 2, of each text: the history and the last token.

    No more than the history has room for are looked at. Ids are below `vocab_size`.
    """
    # More would only be padding.
    width = min(width, history.tokens.shape[1])
    # The newest token is not in the history yet and takes the last place.
    start = history.length - (width - 1)
    places = jnp.arange(width - 1)
    # The window may begin before the text.
    is_text = start[:, None] + places >= 0
    tokens = jnp.where(is_text, history.window(start, width - 1), _NO_TEXT)
    tokens = jnp.concatenate([tokens, last_token[:, None]], axis=1)
    followed = tokens[:, 1:]
    rows = jnp.arange(followed.shape[0])[:, None]
    # The last place of each token; what is no text comes under some label or other.
    last_place = jnp.zeros([followed.shape[0], vocab_size], jnp.int32)
    last_place = last_place.at[rows, followed].max(jnp.broadcast_to(places, followed.shape))
    # Labels below u keep the tables of counts as small as the window, not the vocabulary.
    label = jnp.take_along_axis(last_place, followed, axis=1, mode="clip")
    return Window(tokens, followed, label)


def first_matches(window: Window, longest: int) -> Int32[Array, "b p"]:
    """Returns the lengths of the matches with the text's end, its newest token left out.

    Matches longer than `longest` count as this long.
    """
    lengths = jnp.zeros(window.followed.shape, jnp.int32)
    width = window.tokens.shape[1]
    # Only the last tokens can lengthen a match that is capped at `longest`.
    for place in range(max(width - longest, 0), width - 1):
        lengths = lengthen(window, lengths, window.tokens[:, place], longest)
    return lengths


def lengthen(
    window: Window, lengths: Int32[Array, "b p"], token: RowTokens, longest: int
) -> Int32[Array, "b p"]:
    """Returns the lengths of the matches once a token follows the end that they agree with.

    Those longer than `longest` count as this long.
    """
    # A match that ended one place earlier goes on here.
    before = jnp.pad(lengths[:, :-1], ((0, 0), (1, 0)))
    # Negative ids are what lies before the text: they agree with nothing.
    agrees = (window.tokens[:, :-1] == token[:, None]) & (token >= 0)[:, None]
    return jnp.where(agrees, jnp.minimum(before + 1, longest), 0)


def longest_matches(
    lengths: Int32[Array, "b p"], shortest: int
) -> tuple[RowCounts, Bool[Array, "b p"]]:
    """Returns the length of each row's longest match, [b], and where there is one of it, [b p].

    Those shorter than `shortest` do not count; without another the length is 0.
    """
    length = jnp.max(lengths, axis=1)
    # 0 tells the caller that the row has no draft.
    length = jnp.where(length >= shortest, length, 0)
    return length, (lengths == length[:, None]) & (length > 0)[:, None]


def most_frequent(window: Window, is_match: Bool[Array, "b p"]) -> RowTokens:
    """Returns what followed most often where there is a match, [b]; of equals the most recent."""
    num_places = is_match.shape[1]
    counts = _count_equals(window, is_match)
    # One maximum over both criteria: the count, then the more recent place.
    score = jnp.where(is_match, counts * num_places + jnp.arange(num_places), 0)
    place = jnp.max(score, axis=1, keepdims=True) % num_places
    return jnp.take_along_axis(window.followed, place, axis=1)[:, 0]


def log_counts(
    window: Window, is_match: Bool[Array, "b p"], vocab_size: int
) -> Float32[Array, "b v"]:
    """Returns the logarithm of how often each token followed where there is a match."""
    rows = jnp.arange(is_match.shape[0])[:, None]
    here = jnp.log(_count_equals(window, is_match).astype(jnp.float32))
    nothing = jnp.full([is_match.shape[0], vocab_size], -jnp.inf, jnp.float32)
    # `max` and not `set`: places without a match must not erase the count of one with it.
    return nothing.at[rows, window.followed].max(jnp.where(is_match, here, -jnp.inf))


def _count_equals(window: Window, is_match: Bool[Array, "b p"]) -> Int32[Array, "b p"]:
    """Returns how often what followed each place followed where there is a match."""
    rows = jnp.arange(is_match.shape[0])[:, None]
    # Added up by label, then read back at each place: [b p] both times.
    counts = jnp.zeros_like(window.label).at[rows, window.label].add(is_match.astype(jnp.int32))
    return jnp.take_along_axis(counts, window.label, axis=1)

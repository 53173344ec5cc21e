"""Where earlier text agrees with a text's end, and which continuation these places speak for.

    place       tokens that agree    what followed there
      17             5                  x y z
       8             2                  x y q
      31             2                  x u v
       4             1                  w w w

Each length p from 1 on gives an estimate of its own: of the places where at least p tokens agree,
the share at which a continuation's first j tokens followed estimates the probability that the
target will say them. The sum of these shares is the expected number of accepted drafts. All
continuations that were seen are compared under all p, and the one with the largest sum is taken:
the score of SuffixDecoding (arXiv 2411.04975, section 3.3), for which the paper grows a path
greedily. At most `growth` times p tokens count, and none whose share is below `min_share`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.typing import DraftTokens, RowCounts
from jspec.drafters.memory import History
from jspec.drafters.prompt_lookup import match_lengths


class Matches(struct.PyTreeNode):
    """Earlier places that agree with the end of each text.

    Attributes:
      length: how many tokens agree, [b m]; 0 for no place at all.
      followed: the tokens after each place, [b m w]; negative from the end of its text on.
    """

    length: Int32[Array, "b m"]
    followed: Int32[Array, "b m w"]


class Choice(NamedTuple):
    """One continuation of each text.

    Attributes:
      tokens: [b w]; those from `num_tokens` on mean nothing.
      num_tokens: how many are worth drafting, [b]; 0 where nothing agrees.
      length: tokens that had to agree for the estimate by which it was chosen, [b].
      expected: the sum of the shares, [b].
    """

    tokens: DraftTokens
    num_tokens: RowCounts
    length: RowCounts
    expected: Float32[Array, "b"]


def own_matches(text: History, *, max_match: int, num_places: int, width: int) -> Matches:
    """Returns the places in each text that agree longest with its end, of equals the most recent.

    A place so recent that the text runs out before `width` tokens goes on with what followed it: a
    repetition is continued. Matches longer than `max_match` count as this long.
    """
    capacity = text.tokens.shape[1]
    lengths = match_lengths(text, max_match)
    # One order over both criteria. In float32, as XLA sorts whole rows of integers on a CPU; it is
    # exact below 2^24, and beyond that only confuses neighbours.
    rank = lengths.astype(jnp.float32) * capacity + jnp.arange(capacity, dtype=jnp.float32)
    _, place = jax.lax.top_k(rank, min(num_places, capacity))
    period = jnp.maximum(text.length[:, None] - 1 - place, 1)[..., None]
    slots = place[..., None] + 1 + jnp.arange(width) % period
    rows = jnp.arange(slots.shape[0])[:, None, None]
    length = jnp.take_along_axis(lengths, place, axis=1)
    return Matches(length, text.tokens.at[rows, slots].get(mode="clip"))


def choose_continuation(
    matches: Matches, *, max_match: int, growth: float, min_share: float
) -> Choice:
    """Returns the continuation that the matches speak for; of equals that of the longer match."""
    width = matches.followed.shape[2]
    # From the longest on, so that the first maximum is the one of the longest.
    needed = jnp.arange(max_match, 0, -1)
    is_in = matches.length[:, None] >= needed[:, None]  # [b p m]
    share = _shares(is_in, matches.followed)
    is_worth = (share >= min_share) & is_in[..., None]
    is_worth &= jnp.arange(1, width + 1) <= growth * needed[:, None, None]
    expected = jnp.sum(jnp.where(is_worth, share, 0.0), axis=3)  # [b p m]
    # One argmax over lengths and places.
    best = jnp.argmax(expected.reshape(len(expected), -1), axis=1).astype(jnp.int32)
    by_length, place = jnp.divmod(best, matches.length.shape[1])
    rows = jnp.arange(len(expected))
    return Choice(
        matches.followed[rows, place],
        # Shares only fall along a continuation, so those that are worth it come first.
        jnp.sum(is_worth[rows, by_length, place], axis=1, dtype=jnp.int32),
        needed[by_length],
        expected[rows, by_length, place],
    )


def _shares(
    is_in: Bool[Array, "b p m"], followed: Int32[Array, "b m w"]
) -> Float32[Array, "b p m w"]:
    """Returns the share of the places that are in at which each continuation's beginning came."""
    # Whether two places have the first j tokens in common.
    agree = (followed[:, :, None] == followed[:, None]) & (followed >= 0)[:, None]
    agree = jnp.cumprod(agree, axis=3, dtype=jnp.int32).astype(jnp.float32)  # [b m m w]
    weights = is_in.astype(jnp.float32)
    # Counts up to m are exact in float32, whatever a GPU rounds the factors to.
    counts = jnp.einsum("bpk,bikw->bpiw", weights, agree)
    return counts / jnp.maximum(jnp.sum(weights, axis=2), 1.0)[:, :, None, None]

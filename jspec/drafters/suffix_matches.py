"""Where earlier text agrees with a text's end, and which continuation these places speak for.

    place       tokens that agree    votes    what followed there
      17             5                 1         x y z
       8             5                 1         x y q
      31             3                1/16       x u v
       4             2                1/64       w w w

Every place votes for what followed it, with a quarter of the weight for each token less that
agrees: the longest matches decide, and shorter ones where these are divided. The share of the votes
for a continuation's first j tokens estimates the probability that the target will say them, and the
sum of these shares is the expected number of accepted drafts: the score of SuffixDecoding (arXiv
2411.04975, section 3.3). The paper grows a path of high shares greedily; here all continuations
that were seen are compared, and the one with the largest sum is taken.

All sums are of powers of two, and exact in float32. So their order, which may differ with the batch
or the device, changes nothing.
"""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.typing import DraftTokens, RowCounts
from jspec.drafters.memory import History
from jspec.drafters.merged_tree import have_same_paths
from jspec.drafters.prompt_lookup import match_lengths

# A quarter for each token less, down to 2^-12; 64 places and 64 tokens take the bits above.
_BASE, _MOST_TOKENS_LESS = 4.0, 6
MOST_PLACES = MOST_TOKENS = 64
_NOTHING = -1


class Matches(struct.PyTreeNode):
    """Earlier places that agree with the end of each text.

    Attributes:
      agreement: how many tokens agree, [b m], less what the place is trusted less; negative for no
        place at all.
      followed: the tokens after each place, [b m w]; negative from the end of its text on.
    """

    agreement: Int32[Array, "b m"]
    followed: Int32[Array, "b m w"]

    def join(self, other: Self) -> Self:
        """Returns the places of both; of equals these come first."""
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), self, other)


class Votes(NamedTuple):
    """What the places say of each continuation.

    Attributes:
      counts: votes for its first tokens, up to each, [b m w].
      shares: of all votes, [b m w].
      is_worth: whether the token is worth drafting, [b m w]; those that are come first.
      longest: tokens that agree at the place that agrees longest, [b]; negative without a place.
    """

    counts: Float32[Array, "b m w"]
    shares: Float32[Array, "b m w"]
    is_worth: Bool[Array, "b m w"]
    longest: RowCounts


class Choice(NamedTuple):
    """One continuation of each text.

    Attributes:
      tokens: [b w]; those from `num_tokens` on mean nothing.
      num_tokens: how many are worth drafting, [b].
      agreement: of the place that agrees longest, [b]; negative where there is none.
    """

    tokens: DraftTokens
    num_tokens: RowCounts
    agreement: RowCounts


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
    rows = jnp.arange(slots.shape[0])[:, None]
    length = lengths[rows, place]
    agreement = jnp.where(length > 0, length, _NOTHING)
    return Matches(agreement, text.tokens.at[rows[..., None], slots].get(mode="clip"))


def count_votes(matches: Matches, *, growth: float, min_share: float) -> Votes:
    """Returns the votes for every continuation.

    At most `growth` times as many tokens as agree are worth drafting, and none with a smaller share
    of the votes than `min_share`. There are at most `MOST_PLACES` places and `MOST_TOKENS` tokens.
    """
    agreement, followed = matches.agreement, matches.followed
    longest = jnp.max(agreement, axis=1)
    num_less = longest[:, None] - agreement
    has_vote = (agreement >= 0) & (num_less <= _MOST_TOKENS_LESS)
    weights = jnp.where(has_vote, _BASE ** -num_less.astype(jnp.float32), 0.0)
    # Whether two places have the first j tokens in common; past the end of a text there are none.
    agree = have_same_paths(followed) & (followed >= 0)[:, None]
    agreeing = agree.astype(jnp.float32)
    counts = jnp.einsum("bk,bikw->biw", weights, agreeing, precision="highest")
    # Past the end of its text a continuation has no vote.
    total = jnp.sum(weights, axis=1)[:, None, None]
    is_worth = (counts > 0) & (counts >= min_share * total)
    most = jnp.floor(growth * jnp.maximum(longest, 1).astype(jnp.float32))
    is_worth &= jnp.arange(followed.shape[2]) < most.astype(jnp.int32)[:, None, None]
    return Votes(counts, counts / jnp.maximum(total, 1.0), is_worth, longest)


def choose_continuation(matches: Matches, *, growth: float, min_share: float) -> Choice:
    """Returns the continuation with the most votes, of equals the first; see `count_votes`."""
    votes = count_votes(matches, growth=growth, min_share=min_share)
    score = jnp.sum(jnp.where(votes.is_worth, votes.counts, 0.0), axis=2)
    best, rows = jnp.argmax(score, axis=1).astype(jnp.int32), jnp.arange(len(score))
    # Votes only fall along a continuation, so the tokens that are worth it come first.
    num_tokens = jnp.sum(votes.is_worth[rows, best], axis=1, dtype=jnp.int32)
    return Choice(matches.followed[rows, best], num_tokens, votes.longest)

"""Prompt lookup: propose what followed the last time the text ended like this.

After prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding) and LLMA (arXiv
2304.04487). The longest suffix of prompt and output that occurs earlier decides; among equally long
matches, the most recent. A match so recent that the text runs out before enough tokens are copied
goes on copying what it has proposed: a repetition is continued. Drafts follow from the text alone,
so their distribution is one-hot. No match, no draft.

With `tree_depth` the continuations of several places are a tree, here and in `suffix`.

    place   agree   followed      tree of prompt_lookup      tree of suffix
      17      5      x y z        x ─┬─ y ── z               x ─┬─ y ── z
       8      5      x y q           └─ u                       ├─ ...
      31      3      x u v        w                          every node by its share of the votes

`prompt_lookup` believes the places in their order, the longest match first and of equals the most
recent: what the second of two goes on with is kept where that of the first is refused. `suffix`
scores a path by the share of the votes for it, the product of the shares at its nodes, as
SuffixDecoding does (arXiv 2411.04975).
"""

import dataclasses
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float32, Int32

from jspec.common.typing import Params, RowCounts
from jspec.drafters.branches import Branches, have_same_paths, merge_branches
from jspec.drafters.memory import History, Remembering
from jspec.drafters.spec import BuiltDrafter, DrafterSpec, DraftingTrees, Shape, certain_tree_shape
from jspec.speculation.acceptance.tree import NEVER
from jspec.speculation.types import Kind, Proposal, RoundInputs

_NUM_PLACES = 8  # that a tree asks; later ones are hardly ever right
_NOTHING = -1  # agreement of a place that does not agree
# How often a first draft and a later one are kept, by the length of the match: SmolLM2-135M on
# 39 prompts of Spec-Bench at temperature 0 and 26 at temperature 1, in between.
_ASSUMED = ((0.16, 0.53), (0.36, 0.62), (0.5, 0.75), (0.6, 0.75), (0.6, 0.75), (0.7, 0.75),
            (0.75, 0.85), (0.9, 0.9))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PromptLookupDrafter(DraftingTrees, Remembering):
    """Proposes what followed earlier occurrences of the last few tokens: of one, or a tree of all.

    Attributes:
      num_draft_tokens: drafts a round.
      min_match: tokens that must match for a draft to be made.
      max_match: matches longer than this count as this long.
      growth: at most this times the length of the match are proposed; 0 sets no such limit.
    """

    num_draft_tokens: int
    min_match: int = 1
    max_match: int = 8
    growth: float = 0.0

    @property
    def chain_kinds(self) -> tuple[Kind, ...]:
        """One for each length of match: a longer one is followed more faithfully."""
        return tuple(map(self._kind, range(1, self.max_match + 1)))

    def _kind(self, length: int) -> Kind:
        most = self.num_draft_tokens
        if self.growth > 0:
            most = min(most, int(self.growth * length))
        return Kind("prompt_lookup", *_ASSUMED[min(length, len(_ASSUMED)) - 1], most)

    def propose(
        self, params: Params, state: History, inputs: RoundInputs
    ) -> tuple[Proposal, History]:
        """Looks the text's end up in the text."""
        # The newest token is part of the suffix to be matched, though not committed yet.
        text = state.append_one(inputs.last_token)
        if self.shape is not None:
            return self._propose_tree(self.shape, text, inputs), state
        match_length, match_end = longest_match(text, self.max_match)
        # Past the text's end the copy goes on with itself: a repetition is continued.
        period = jnp.maximum(text.length - 1 - match_end, 1)[:, None]
        offsets = jnp.arange(self.num_draft_tokens) % period
        slots = match_end[:, None] + 1 + offsets
        tokens = jnp.take_along_axis(text.tokens, slots, axis=1, mode="clip")
        # Kind i stands for a match of i + 1 tokens; without a match any kind would do.
        kind = jnp.maximum(match_length, 1) - 1
        num_tokens = jnp.where(match_length >= self.min_match, inputs.limit(kind), 0)
        if self.growth > 0:
            most = jnp.asarray([kind.most for kind in self.kinds], jnp.int32)
            num_tokens = jnp.minimum(num_tokens, most[kind])
        return Proposal(tokens, num_tokens, kind=kind), state

    def _propose_tree(self, shape: Shape, text: History, inputs: RoundInputs) -> Proposal:
        matches = own_matches(
            text, max_match=self.max_match, num_places=_NUM_PLACES, width=shape.depth
        )
        kind = jnp.maximum(matches.agreement[:, 0], 1) - 1  # of the longest match
        is_meant = (matches.agreement >= self.min_match)[..., None]
        if self.growth > 0:
            most = jnp.floor(self.growth * matches.agreement.astype(jnp.float32))
            is_meant &= jnp.arange(shape.depth) < most.astype(jnp.int32)[..., None]
        scores = jnp.where(is_meant, _scores_in_turn(matches, self.kinds), NEVER)
        return best_of_matches(shape, matches, scores, inputs, kind)


def longest_match(text: History, max_match: int) -> tuple[RowCounts, Int32[Array, "b"]]:
    """Finds the earlier position that agrees longest with the end of each text, of equals the last.

    Returns how many tokens agree, [b], `max_match` at most, and the index of the last of them at
    the earlier position, [b].
    """
    capacity = text.tokens.shape[1]
    match_length = match_lengths(text, max_match)
    # One maximum over both criteria: the length, then the more recent position.
    best = jnp.argmax(match_length * capacity + jnp.arange(capacity), axis=1).astype(jnp.int32)
    return jnp.take_along_axis(match_length, best[:, None], axis=1)[:, 0], best


def match_lengths(text: History, max_match: int) -> Int32[Array, "b s"]:
    """Returns how many tokens, `max_match` at most, up to each place agree with the end."""
    capacity = text.tokens.shape[1]
    ends = jnp.arange(capacity)
    # The text's end itself is no earlier position.
    agrees = ends < text.length[:, None] - 1
    match_length = jnp.zeros(text.tokens.shape, jnp.int32)
    # Padded once, so that each shift is a static slice and no gather.
    before = jnp.pad(text.tokens, ((0, 0), (max_match, 0)))
    for back in range(max_match):
        suffix_token = text.window(jnp.maximum(text.length - 1 - back, 0), 1)
        start = max_match - back
        shifted = before[:, start : start + capacity]  # shifted[e] is tokens[e - back]
        agrees &= (shifted == suffix_token) & (ends >= back)
        # `agrees` only ever falls, so the sum is the length of the unbroken match.
        match_length += agrees.astype(jnp.int32)
    return match_length


class Matches(struct.PyTreeNode):
    """Earlier places that agree with the end of each text.

    Attributes:
      agreement: how many tokens agree, [b m], less what the place is trusted less; negative for no
        place at all.
      followed: the tokens after each place, [b m w]; negative from the end of its text on.
    """

    agreement: Int32[Array, "b m"]
    followed: Int32[Array, "b m w"]

    def join(self, more: Self) -> Self:
        """Returns the places of both; of equals these come first."""
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), self, more)


def own_matches(text: History, *, max_match: int, num_places: int, width: int) -> Matches:
    """Returns the places in each text that agree longest with its end, of equals the most recent.

    A place so recent that the text runs out before `width` tokens goes on with what followed it.
    Matches longer than `max_match` count as this long.
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


def _scores_in_turn(matches: Matches, kinds: Sequence[Kind]) -> Float32[Array, "b m w"]:
    """Returns the scores of what followed, where each place is believed after those before it."""
    tokens = matches.followed
    rates = jnp.array([(kind.first, kind.later) for kind in kinds], jnp.float32)
    first, later = jnp.moveaxis(rates[jnp.clip(matches.agreement, 1, len(kinds)) - 1], -1, 0)
    place = jnp.arange(tokens.shape[2])
    rate = jnp.where(place == 0, first[..., None], later[..., None])
    same = have_same_paths(tokens)
    is_before = jnp.tri(tokens.shape[1], k=-1, dtype=bool)[..., None]
    is_own = ~(same & is_before).any(axis=2)  # no place before goes on alike so far
    # Those before that part here: all of them were refused.
    starts_alike = jnp.pad(same[..., :-1], [(0, 0)] * 3 + [(1, 0)], constant_values=True)
    is_refused = starts_alike & ~same & is_before & is_own[:, None]
    refused = jnp.sum(jnp.where(is_refused, jnp.log1p(-rate)[:, None], 0.0), axis=2)
    owner = jnp.argmax(same, axis=2)
    step = jnp.take_along_axis(jnp.log(rate) + refused, owner, axis=1)
    return jnp.cumsum(step, axis=2)


def best_of_matches(
    shape: Shape,
    matches: Matches,
    scores: Float32[Array, "b m w"],
    inputs: RoundInputs,
    kind: RowCounts,
) -> Proposal:
    """Returns the tree of the best of what followed, by scores as those of `Branches`."""
    branches = Branches(jnp.maximum(matches.followed, 0), scores)
    tree = merge_branches(branches, shape.num_draft_tokens, inputs.limit(kind), shape.branches)
    return tree.replace(kind=kind)


def build(spec: DrafterSpec) -> BuiltDrafter:
    """Returns the drafter, of chains or of trees."""
    shape, growth = certain_tree_shape(spec), spec.options.lookup_growth
    least = 2 if spec.is_in_cascade and shape is None else 1
    min_match = spec.options.lookup_min_match or least
    return BuiltDrafter(
        PromptLookupDrafter(spec.num_draft_tokens, min_match, growth=growth, shape=shape)
    )

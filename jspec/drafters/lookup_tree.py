"""A tree of what followed at several places: `prompt_lookup` and `suffix` with `tree_depth`.

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

import jax.numpy as jnp
from jaxtyping import Array, Float32

from jspec.common.typing import Params, RowCounts
from jspec.drafters.cascade import Branches, have_same_paths, merge_branches
from jspec.drafters.memory import History
from jspec.drafters.prompt_lookup import PromptLookupDrafter
from jspec.drafters.suffix import Matches, SuffixDrafter, count_votes, own_matches
from jspec.drafters.tree_options import DraftingTrees, Shape
from jspec.speculation.acceptance.tree import NEVER
from jspec.speculation.acceptance.types import Proposal
from jspec.speculation.control import Kind
from jspec.speculation.types import RoundInputs

_NUM_PLACES = 8  # that `prompt_lookup` asks; later ones are hardly ever right


@dataclasses.dataclass(frozen=True)
class LookupTreeDrafter(DraftingTrees, PromptLookupDrafter):
    """Proposes the continuations of several earlier occurrences.

    Attributes:
      shape: of the tree.
    """

    shape: Shape = dataclasses.field(kw_only=True)

    def propose(
        self, params: Params, state: History, inputs: RoundInputs
    ) -> tuple[Proposal, History]:
        """Looks the text's end up in the text."""
        text = state.append_one(inputs.last_token)
        matches = own_matches(
            text, max_match=self.max_match, num_places=_NUM_PLACES, width=self.shape.depth
        )
        longest = matches.agreement[:, 0]
        kind = jnp.maximum(longest, 1) - 1
        is_meant = (matches.agreement >= self.min_match)[..., None]
        if self.growth > 0:
            most = jnp.floor(self.growth * matches.agreement.astype(jnp.float32))
            is_meant &= jnp.arange(self.shape.depth) < most.astype(jnp.int32)[..., None]
        scores = jnp.where(is_meant, _scores_in_turn(matches, self.kinds), NEVER)
        return _best_of(self.shape, matches, scores, inputs, kind), state


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


@dataclasses.dataclass(frozen=True)
class SuffixTreeDrafter(DraftingTrees, SuffixDrafter):
    """Proposes the continuations with the largest shares of the votes.

    Attributes:
      shape: of the tree.
    """

    shape: Shape = dataclasses.field(kw_only=True)

    def propose(
        self, params: Params, state: History, inputs: RoundInputs
    ) -> tuple[Proposal, History]:
        """Looks the text's end up in the text and in the corpus."""
        matches = self.matches(params, state.append_one(inputs.last_token), self.shape.depth)
        votes = count_votes(matches, growth=self.growth, min_share=self.min_share)
        kind = self.kind_of(votes.longest)
        rates = jnp.array([(kind.first, kind.later) for kind in self.kinds], jnp.float32)
        first, later = jnp.log(rates[kind]).T
        place = jnp.arange(self.shape.depth, dtype=jnp.float32)
        kept = first[:, None] + place * later[:, None]
        is_meant = votes.is_worth & (votes.longest >= self.min_match)[:, None, None]
        scores = jnp.where(is_meant, jnp.log(votes.shares) + kept[:, None], NEVER)
        return _best_of(self.shape, matches, scores, inputs, kind), state


def _best_of(
    shape: Shape,
    matches: Matches,
    scores: Float32[Array, "b m w"],
    inputs: RoundInputs,
    kind: RowCounts,
) -> Proposal:
    branches = Branches(jnp.maximum(matches.followed, 0), scores)
    tree = merge_branches(branches, shape.num_draft_tokens, inputs.limit(kind), shape.branches)
    return tree.replace(kind=kind)

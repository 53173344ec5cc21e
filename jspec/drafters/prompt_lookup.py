"""Prompt lookup: propose what followed the last time the text ended like this.

After prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding) and LLMA (arXiv
2304.04487). The longest suffix of prompt and output that occurs earlier decides; among equally long
matches, the most recent. A match so recent that the text runs out before enough tokens are copied
goes on copying what it has proposed: a repetition is continued. Drafts follow from the text alone,
so their distribution is one-hot. No match, no draft.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jspec.common.typing import Params, RowCounts
from jspec.drafters.memory import History, Remembering
from jspec.drafters.spec import BuiltDrafter, DrafterEntry, DrafterSpec, option
from jspec.drafters.tree_options import TreeSizeOptions, certain_tree_shape
from jspec.speculation.acceptance.types import Proposal
from jspec.speculation.types import Kind, RoundInputs

# How often a first draft and a later one are kept, by the length of the match: SmolLM2-135M on
# 39 prompts of Spec-Bench at temperature 0 and 26 at temperature 1, in between.
_ASSUMED = ((0.16, 0.53), (0.36, 0.62), (0.5, 0.75), (0.6, 0.75), (0.6, 0.75), (0.7, 0.75),
            (0.75, 0.85), (0.9, 0.9))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LookupOptions(TreeSizeOptions):
    """Of `prompt_lookup`."""

    # A cascade's other members have better drafts than those of one token's match. A tree has room
    # for theirs as well.
    lookup_min_match: int = option(
        0,
        "For prompt_lookup: number of tokens that must match; 0 means 1, or 2 in a cascade of "
        "chains.",
        between=(0, 8),
    )
    lookup_growth: float = option(
        0.0,
        "For prompt_lookup: propose at most this times the length of the match; 0 for no limit.",
        between=(0, 100),
    )


@dataclasses.dataclass(frozen=True)
class PromptLookupDrafter(Remembering):
    """Proposes the continuation of an earlier occurrence of the last few tokens.

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
    def kinds(self) -> tuple[Kind, ...]:
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


def longest_match(text: History, max_match: int) -> tuple[RowCounts, Int32[Array, "b"]]:
    """Finds the earlier position that agrees longest with the end of each text.

    Returns:
      How many tokens agree, [b], `max_match` at most, and the index of the last of them at the
      earlier position, [b]; the most recent position among equals.
    """
    capacity = text.tokens.shape[1]
    match_length = match_lengths(text, max_match)
    # One maximum over both criteria: the length, then the more recent position.
    best = jnp.argmax(match_length * capacity + jnp.arange(capacity), axis=1).astype(jnp.int32)
    return jnp.take_along_axis(match_length, best[:, None], axis=1)[:, 0], best


def match_lengths(text: History, max_match: int) -> Int32[Array, "b s"]:
    """Returns how many tokens up to each earlier position agree with the end of the text.

    `max_match` at most are compared.
    """
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


def _build(spec: DrafterSpec) -> BuiltDrafter:
    from jspec.drafters.lookup_tree import LookupTreeDrafter  # which builds on this module

    shape, growth = certain_tree_shape(spec), spec.options.lookup_growth
    least = 2 if spec.is_in_cascade and shape is None else 1
    min_match = spec.options.lookup_min_match or least
    drafter = PromptLookupDrafter(spec.num_draft_tokens, min_match, growth=growth)
    if shape is not None:
        drafter = LookupTreeDrafter(**vars(drafter), shape=shape)
    return BuiltDrafter(drafter)


ENTRY = DrafterEntry(
    name="prompt_lookup",
    build=_build,
    proposes="what followed the last time the text ended like this",
    source="2304.04487",
    options=LookupOptions,
    prior_cost=1.09,  # three drafts
)

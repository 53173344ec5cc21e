"""Suffix decoding (arXiv 2411.04975): propose what most often followed texts that ended like this.

Where `prompt_lookup` copies what followed the last place that agrees longest, this drafter asks all
of them, in the row's own text and in a corpus of earlier answers, and takes the continuation on
which they agree most; see `suffix_matches`. It drafts further after long matches, and stops where
what follows is a matter of chance. Drafts follow from the text alone, so their distribution is
one-hot. No match, no draft.
"""

import dataclasses

import jax.numpy as jnp

from jspec.common.typing import Params, RowCounts
from jspec.drafters.memory import History, Remembering
from jspec.drafters.spec import BuiltDrafter, DrafterEntry, DrafterSpec, option
from jspec.drafters.suffix_corpus import MAX_MATCH, Corpus, corpus_matches, load_corpus
from jspec.drafters.suffix_matches import (
    MOST_PLACES,
    MOST_TOKENS,
    Matches,
    choose_continuation,
    own_matches,
)
from jspec.drafters.tree_options import TreeSizeOptions, certain_tree_shape
from jspec.speculation.acceptance.types import Proposal
from jspec.speculation.types import Kind, RoundInputs

_NUM_PLACES = MOST_PLACES // 2  # that are asked in the text, and as many in the corpus
# How often a first draft and a later one are kept, by the length of the match: SmolLM2-135M on 39
# prompts of Spec-Bench at temperature 0.
_ASSUMED = ((0.24, 0.65), (0.47, 0.68), (0.52, 0.8), (0.6, 0.76), (0.6, 0.76), (0.75, 0.76),
            (0.8, 0.85), (0.93, 0.97))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SuffixOptions(TreeSizeOptions):
    """Of `suffix`."""

    draft_corpus: str | None = option(
        None,
        "For suffix: a file of earlier answers (.jsonl, as --output_json writes) or of one plain "
        "text, in which the text's end is looked up, too.",
    )
    suffix_growth: float = option(
        4.0,
        "For suffix: propose at most this times the length of the match.",
        between=(1, 100),
    )
    suffix_min_share: float = option(
        0.1,
        "For suffix: stop where a smaller share of the places that match go on like this.",
        between=(0, 1),
    )
    # A cascade's other members have better drafts than those of one token's match. A tree has room
    # for theirs as well.
    suffix_min_match: int = option(
        0,
        "For suffix: number of tokens that must match; 0 means 1, or 2 in a cascade of chains. "
        "Tokens that match in --draft_corpus count one less.",
        between=(0, MAX_MATCH),
    )


@dataclasses.dataclass(frozen=True)
class SuffixDrafter(Remembering):
    """Proposes the continuation with the most expected accepted drafts.

    Attributes:
      num_draft_tokens: drafts a round.
      growth: at most this times the length of the match are proposed.
      min_share: a draft is proposed if this share of the places that match go on like this.
      min_match: tokens that must match for a draft to be made, one more in the corpus.
    """

    num_draft_tokens: int
    growth: float = 4.0
    min_share: float = 0.1
    min_match: int = 0

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """One for each length of match: a longer one is followed more faithfully."""
        lengths = [*range(1, len(_ASSUMED)), MAX_MATCH]  # the last kind is of all longer ones
        most = [min(self.num_draft_tokens, int(self.growth * length)) for length in lengths]
        return tuple(Kind("suffix", *rates, n) for rates, n in zip(_ASSUMED, most, strict=True))

    def matches(self, params: Params, text: History, width: int) -> Matches:
        """Returns the places in the text and in the corpus that agree with the text's end."""
        matches = own_matches(text, max_match=MAX_MATCH, num_places=_NUM_PLACES, width=width)
        if not isinstance(params, Corpus):  # there may be none
            return matches
        return matches.join(corpus_matches(params, text, num_places=_NUM_PLACES, width=width))

    def kind_of(self, agreement: RowCounts) -> RowCounts:
        """Returns the kind of a proposal: kind i stands for i + 1 tokens that agree."""
        # Without a match any kind would do.
        return jnp.clip(agreement, 1, len(_ASSUMED)) - 1

    def propose(
        self, params: Params, state: History, inputs: RoundInputs
    ) -> tuple[Proposal, History]:
        """Looks the text's end up in the text and in the corpus."""
        # The newest token is part of what is to be matched, though not committed yet.
        matches = self.matches(params, state.append_one(inputs.last_token), self.num_draft_tokens)
        choice = choose_continuation(matches, growth=self.growth, min_share=self.min_share)
        kind = self.kind_of(choice.agreement)
        num_tokens = jnp.minimum(choice.num_tokens, inputs.limit(kind))
        num_tokens = jnp.where(choice.agreement >= self.min_match, num_tokens, 0)
        return Proposal(jnp.maximum(choice.tokens, 0), num_tokens, kind=kind), state


def _build(spec: DrafterSpec) -> BuiltDrafter:
    from jspec.drafters.lookup_tree import SuffixTreeDrafter  # which builds on this module

    options, corpus, shape = spec.options, None, certain_tree_shape(spec)
    if options.draft_corpus is not None:
        assert spec.tokenizer is not None
        corpus = load_corpus(options.draft_corpus, spec.tokenizer, spec.target_config.vocab_size)
    drafter = SuffixDrafter(
        min(spec.num_draft_tokens, MOST_TOKENS) if shape is None else spec.num_draft_tokens,
        growth=options.suffix_growth,
        min_share=options.suffix_min_share,
        min_match=options.suffix_min_match or (2 if spec.is_in_cascade and shape is None else 0),
    )
    if shape is not None:
        drafter = SuffixTreeDrafter(**vars(drafter), shape=shape)
    return BuiltDrafter(drafter, corpus)


ENTRY = DrafterEntry(
    name="suffix",
    build=_build,
    proposes="what most often followed text that ended like this",
    source="2411.04975",
    options=SuffixOptions,
)

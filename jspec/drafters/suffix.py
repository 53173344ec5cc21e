"""Suffix decoding (arXiv 2411.04975): propose what most often followed texts that ended like this.

Where `prompt_lookup` copies what followed the last place that agrees longest, this drafter asks all
of them, in the row's own text and in a corpus of earlier answers, and weighs how often each
continuation came against how much of the text agrees; see `suffix_matches`. So it drafts further
after long matches, and stops where what follows is a matter of chance. Drafts follow from the text
alone, so their distribution is one-hot.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jspec.drafters.memory import History, Remembering
from jspec.drafters.spec import BuiltDrafter, DrafterEntry, DrafterSpec, Options, option
from jspec.drafters.suffix_corpus import MAX_MATCH, Corpus, corpus_matches, load_corpus
from jspec.drafters.suffix_matches import Choice, Matches, choose_continuation, own_matches
from jspec.speculation.acceptance.types import Proposal
from jspec.speculation.types import Kind, RoundInputs

_NUM_PLACES = 32  # that are asked, in the text and in the corpus
# How often a first draft and a later one are kept, by the length of the match.
_ASSUMED = ((0.16, 0.53), (0.36, 0.62), (0.5, 0.75), (0.6, 0.75), (0.6, 0.75), (0.7, 0.75),
            (0.75, 0.85), (0.9, 0.9))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SuffixOptions(Options):
    """Of `suffix`."""

    draft_corpus: str | None = option(
        None,
        "For suffix: a file of earlier answers (.jsonl, as --output_json writes) or of one plain "
        "text, in which the text's end is looked up, too.",
    )
    suffix_growth: float = option(
        2.0,
        "For suffix: propose at most this times the length of the match.",
        between=(0.1, 100),
    )
    suffix_min_share: float = option(
        0.1,
        "For suffix: stop where the share of the places that go on like this falls below it.",
        between=(0, 1),
    )
    suffix_min_score: float = option(
        0.0,
        "For suffix: propose nothing where fewer drafts than this are expected to be accepted; 0 "
        "means no such limit, or, in a cascade, 1.",
        between=(0, 100),
    )


@dataclasses.dataclass(frozen=True)
class SuffixDrafter(Remembering):
    """Proposes the continuation with the most expected accepted drafts.

    Attributes:
      num_draft_tokens: drafts a round.
      growth: at most this times the length of the match are proposed.
      min_share: a draft is proposed if this share of the places that agree go on like this.
      min_score: nothing is proposed where fewer drafts than this are expected to be accepted.
    """

    num_draft_tokens: int
    growth: float = 2.0
    min_share: float = 0.1
    min_score: float = 0.0

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """One for each length of match: a longer one is followed more faithfully."""
        most = [min(self.num_draft_tokens, int(self.growth * n)) for n in range(1, MAX_MATCH + 1)]
        most = most[: len(_ASSUMED) - 1] + most[-1:]  # the last kind is of all longer ones
        return tuple(Kind("suffix", *rates, n) for rates, n in zip(_ASSUMED, most, strict=True))

    def propose(
        self, params: Corpus | None, state: History, inputs: RoundInputs
    ) -> tuple[Proposal, History]:
        """Looks the text's end up in the text and in the corpus."""
        # The newest token is part of what is to be matched, though not committed yet.
        choice = self._choose(params, state.append_one(inputs.last_token))
        is_good = (choice.num_tokens > 0) & (choice.expected >= self.min_score)
        # Kind i stands for i + 1 tokens; without a match any kind would do.
        kind = jnp.where(is_good, jnp.minimum(choice.length, len(_ASSUMED)), 1) - 1
        num_tokens = jnp.where(is_good, jnp.minimum(choice.num_tokens, inputs.limit(kind)), 0)
        return Proposal(jnp.maximum(choice.tokens, 0), num_tokens, kind=kind), state

    def _choose(self, corpus: Corpus | None, text: History) -> Choice:
        sizes = {"num_places": _NUM_PLACES, "width": self.num_draft_tokens}
        own = own_matches(text, max_match=MAX_MATCH, **sizes)
        if corpus is None:
            return self._weigh(own)
        choices = self._weigh(own), self._weigh(corpus_matches(corpus, text, **sizes))
        is_own = choices[0].expected >= choices[1].expected

        def choose(one: jax.Array, other: jax.Array) -> jax.Array:
            return jnp.where(is_own.reshape(-1, *[1] * (one.ndim - 1)), one, other)

        return jax.tree.map(choose, *choices)

    def _weigh(self, matches: Matches) -> Choice:
        return choose_continuation(
            matches, max_match=MAX_MATCH, growth=self.growth, min_share=self.min_share
        )


def _build(spec: DrafterSpec) -> BuiltDrafter:
    options, corpus = spec.options, None
    if options.draft_corpus is not None:
        assert spec.tokenizer is not None
        corpus = load_corpus(options.draft_corpus, spec.tokenizer, spec.target_config.vocab_size)
    drafter = SuffixDrafter(
        spec.num_draft_tokens,
        growth=options.suffix_growth,
        min_share=options.suffix_min_share,
        # A cascade's other members have better drafts than those that are hardly expected to hold.
        min_score=options.suffix_min_score or float(spec.is_in_cascade),
    )
    return BuiltDrafter(drafter, corpus)


ENTRY = DrafterEntry(
    name="suffix",
    build=_build,
    proposes="what most often followed texts that ended like this, here and in `--draft_corpus`",
    source="2411.04975",
    options=SuffixOptions,
)

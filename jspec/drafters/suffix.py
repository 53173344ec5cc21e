"""Suffix decoding (arXiv 2411.04975): propose what most often followed texts that ended like this.

Where `prompt_lookup` copies what followed the last place that agrees longest, this drafter asks all
of them, in the row's own text, in a corpus of earlier answers and in those that came meanwhile (see
`corpus`), and takes the continuation on which they agree most. A place in another text must agree
by one token more to count as much. Drafts follow from texts alone, so their distribution is
one-hot. No match, no draft.

place       tokens that agree    votes    what followed there
      17             5                 1         x y z
       8             5                 1         x y q
      31             3                1/16       x u v
       4             2                1/64       w w w

Every place votes for what followed it, with a quarter of the weight for each token less that
agrees. The share of the votes for a continuation's first j tokens estimates the probability that
the target will say them, and the sum of these shares is the expected number of accepted drafts
(section 3.3). The paper grows a path of high shares greedily; here all continuations that were seen
are compared, and the one with the largest sum is taken. All sums are of powers of two, and exact in
float32, so their order changes nothing.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from jspec.common.typing import RowCounts, RowFlags
from jspec.drafters.branches import have_same_paths
from jspec.drafters.corpus import MAX_MATCH, AnswerMemory, Corpus, corpus_matches, load_corpus
from jspec.drafters.memory import History, Remembering
from jspec.drafters.prompt_lookup import Matches, best_of_matches, own_matches
from jspec.drafters.spec import BuiltDrafter, DrafterSpec, DraftingTrees, Shape, certain_tree_shape
from jspec.speculation.acceptance.tree import NEVER
from jspec.speculation.types import Kind, Proposal, RoundInputs

# A quarter for each token less, down to 2^-12; 64 places and 64 tokens take the bits above.
_BASE, _MOST_TOKENS_LESS = 4.0, 6
MOST_PLACES = MOST_TOKENS = 64


class Votes(NamedTuple):
    """What the places say of each continuation.

    Attributes:
      counts: votes for its first tokens, up to and including each, [b m w].
      shares: of all votes, [b m w].
      is_worth: whether the token is worth drafting, [b m w]; those that are come first.
      longest: tokens that agree at the place that agrees longest, [b]; negative without a place.
    """

    counts: Float32[Array, "b m w"]
    shares: Float32[Array, "b m w"]
    is_worth: Bool[Array, "b m w"]
    longest: RowCounts


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


Sources = tuple[Corpus | AnswerMemory, ...] | None  # what is searched besides the text

_NUM_PLACES = MOST_PLACES // 2  # that are asked in the text, and as many in all sources together
# How often a first draft and a later one are kept, by the length of the match: SmolLM2-135M on 39
# prompts of Spec-Bench at temperature 0.
_ASSUMED = ((0.24, 0.65), (0.47, 0.68), (0.52, 0.8), (0.6, 0.76), (0.6, 0.76), (0.75, 0.76),
            (0.8, 0.85), (0.93, 0.97))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SuffixDrafter(DraftingTrees, Remembering):
    """Proposes the continuation with the most expected accepted drafts, or a tree of the best.

    Attributes:
      num_draft_tokens: drafts a round.
      growth: at most this times the length of the match are proposed.
      min_share: a draft is proposed if this share of the places that match go on like this.
      min_match: tokens that must match for a draft to be made, one more in the corpus.
      keeps_answers: whether its sources have earlier answers.
    """

    num_draft_tokens: int
    growth: float = 4.0
    min_share: float = 0.1
    min_match: int = 0
    keeps_answers: bool = False

    @property
    def chain_kinds(self) -> tuple[Kind, ...]:
        """One for each length of match: a longer one is followed more faithfully."""
        lengths = [*range(1, len(_ASSUMED)), MAX_MATCH]  # the last kind is of all longer ones
        most = [min(self.num_draft_tokens, int(self.growth * length)) for length in lengths]
        return tuple(Kind("suffix", *rates, n) for rates, n in zip(_ASSUMED, most, strict=True))

    def matches(self, sources: Sources, state: History, inputs: RoundInputs, width: int) -> Matches:
        """Returns the places in the text and in the sources that agree with the text's end."""
        # The newest token is part of what is to be matched, though not committed yet.
        text = state.append_one(inputs.last_token)
        matches = own_matches(text, max_match=MAX_MATCH, num_places=_NUM_PLACES, width=width)
        sources = sources or ()
        for source in sources:
            is_memory = isinstance(source, AnswerMemory)
            corpus = source.corpus if is_memory else source
            num_places = _NUM_PLACES // len(sources)
            places = corpus_matches(corpus, text, num_places=num_places, width=width)
            matches = matches.join(_where(inputs.is_free, places) if is_memory else places)
        return matches

    def kind_of(self, agreement: RowCounts) -> RowCounts:
        """Returns the kind of a proposal: kind i stands for i + 1 tokens that agree."""
        # Without a match any kind would do.
        return jnp.clip(agreement, 1, len(_ASSUMED)) - 1

    def propose(
        self, params: Sources, state: History, inputs: RoundInputs
    ) -> tuple[Proposal, History]:
        """Looks the text's end up in the text and in the sources."""
        if self.shape is not None:
            return self._propose_tree(self.shape, params, state, inputs), state
        matches = self.matches(params, state, inputs, self.num_draft_tokens)
        votes = count_votes(matches, growth=self.growth, min_share=self.min_share)
        # The continuation with the most votes, of equals the first.
        score = jnp.sum(jnp.where(votes.is_worth, votes.counts, 0.0), axis=2)
        best, rows = jnp.argmax(score, axis=1).astype(jnp.int32), jnp.arange(len(score))
        # Votes only fall along a continuation, so the tokens that are worth it come first.
        num_tokens = jnp.sum(votes.is_worth[rows, best], axis=1, dtype=jnp.int32)
        kind = self.kind_of(votes.longest)
        num_tokens = jnp.minimum(num_tokens, inputs.limit(kind))
        num_tokens = jnp.where(votes.longest >= self.min_match, num_tokens, 0)
        tokens = jnp.maximum(matches.followed[rows, best], 0)
        return Proposal(tokens, num_tokens, kind=kind), state

    def _propose_tree(
        self, shape: Shape, sources: Sources, state: History, inputs: RoundInputs
    ) -> Proposal:
        matches = self.matches(sources, state, inputs, shape.depth)
        votes = count_votes(matches, growth=self.growth, min_share=self.min_share)
        kind = self.kind_of(votes.longest)
        rates = jnp.array([(kind.first, kind.later) for kind in self.kinds], jnp.float32)
        first, later = jnp.log(rates[kind]).T
        place = jnp.arange(shape.depth, dtype=jnp.float32)
        kept = first[:, None] + place * later[:, None]
        is_meant = votes.is_worth & (votes.longest >= self.min_match)[:, None, None]
        scores = jnp.where(is_meant, jnp.log(votes.shares) + kept[:, None], NEVER)
        return best_of_matches(shape, matches, scores, inputs, kind)


def _where(is_free: RowFlags | bool, places: Matches) -> Matches:
    """Returns the places of those rows alone whose tokens are the same with any drafts.

    Elsewhere a seed would give another text after other requests.
    """
    is_free = jnp.reshape(jnp.asarray(is_free), (-1, 1))
    return places.replace(agreement=jnp.where(is_free, places.agreement, -1))


def build(spec: DrafterSpec) -> BuiltDrafter:
    """Returns the drafter, of chains or of trees."""
    options, shape = spec.options, certain_tree_shape(spec)
    sources: tuple[Corpus | AnswerMemory, ...] = ()
    if options.draft_corpus is not None:
        assert spec.tokenizer is not None
        vocab_size = spec.target_config.vocab_size
        sources += (load_corpus(options.draft_corpus, spec.tokenizer, vocab_size),)
    if options.draft_memory > 0:
        sources += (AnswerMemory.empty(options.draft_memory),)
    drafter = SuffixDrafter(
        min(spec.num_draft_tokens, MOST_TOKENS) if shape is None else spec.num_draft_tokens,
        growth=options.suffix_growth,
        min_share=options.suffix_min_share,
        min_match=options.suffix_min_match or (2 if spec.is_in_cascade and shape is None else 0),
        keeps_answers=options.draft_memory > 0,
        shape=shape,
    )
    return BuiltDrafter(drafter, sources)

"""What passes between a drafter, an acceptance rule and a round, and the base of all drafters."""

import enum
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32, Key

from jspec.common.typing import (
    ApplyFn,
    BlockFlags,
    DraftProbs,
    DraftTokens,
    Logits,
    Params,
    RowCounts,
    RowFlags,
    RowSeeds,
    RowTokens,
    TargetProbs,
    Tokens,
)
from jspec.kernels import zeros_if
from jspec.sampling.distribution import TokenLogprobs, best_tokens, sampling_probs
from jspec.sampling.noise import AcceptanceNoise, RoundNoise
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.control import Control, Kind


class Proposal(struct.PyTreeNode):
    """The drafts of one round, for each row a chain, or a tree: see `acceptance.tree`.

    Attributes:
      tokens: the drafts, [b w].
      num_tokens: how many drafts each row has, 0 to w, [b]; the rest is padding, which counts
        neither as proposed nor as rejected.
      probs: the distribution from which each draft was really drawn, after temperature and filters,
        [b w v], and zeros for padding; anything where no rule reads it. After `narrow` it is wider,
        until `as_judged`. None for drafts that follow
        from the context alone: theirs have all probability on the draft. In a tree a distribution
        is that given the earlier siblings: without replacement, they are taken out of it.
      kind: which of the drafter's kinds of proposal each row has, [b]; None for the first kind.
      prefix: the target's call on [last token, drafts], if the drafter has begun it.
      parents: of the drafts in a tree, [b w], each before its children; -1 is the last committed
        token. None for a chain.
      max_depth: of a tree: no draft is deeper, and its children of -1 have depth 1.
      scores: of drafts without a distribution, [b w]: the estimated logarithm of the probability
        that the draft is kept. No rule reads it.
      silent: where several drafters make one proposal, the kinds [b k] of those that had nothing to
        add, though it was their turn. None where `kind` says who was silent.
    """

    tokens: DraftTokens
    num_tokens: RowCounts
    probs: DraftProbs | None = None
    kind: RowCounts | None = None
    prefix: "TargetPrefix | None" = None
    parents: Int32[Array, "b w"] | None = None
    max_depth: int = struct.field(pytree_node=False, default=0)
    scores: Float32[Array, "b w"] | None = None
    silent: Bool[Array, "b k"] | None = None

    @property
    def width(self) -> int:
        """Drafts of each row, padding included."""
        return self.tokens.shape[1]

    def narrow(self, width: int) -> Self:
        """Returns the proposal with only the first `width` drafts of each row.

        Their distributions, which are large, stay whole until a rule reads them: see `as_judged`.
        """
        prefix = self.prefix
        if prefix is not None:
            prefix = prefix.replace(hidden=prefix.hidden[:, : width + 1])
        leaves = {name: getattr(self, name) for name in ("tokens", "parents", "scores")}
        cut = {name: leaf[:, :width] for name, leaf in leaves.items() if leaf is not None}
        most, depth = jnp.minimum(self.num_tokens, width), min(self.max_depth, width)
        return self.replace(**cut, num_tokens=most, prefix=prefix, max_depth=depth)

    def as_judged(self) -> Self:
        """Returns the proposal with the distributions of its own drafts only."""
        probs = self.probs
        return self if probs is None else self.replace(probs=probs[:, : self.width])


def as_tree(proposal: Proposal) -> Proposal:
    """Returns the proposal as a tree; a chain is a tree of one branch."""
    if proposal.parents is not None:
        return proposal
    chain = jnp.arange(proposal.width, dtype=jnp.int32) - 1
    parents = jnp.broadcast_to(chain, proposal.tokens.shape)
    return proposal.replace(parents=parents, max_depth=proposal.width)


class TargetPrefix(struct.PyTreeNode):
    """The first layers of the target's call on [last token, drafts], run by the drafter.

    It has the last of these layers' output at each token of the block, and the target's cache with
    their keys and values of the block written, not committed.
    """

    hidden: Float32[Array, "b t d"]
    cache: Any
    num_layers: int = struct.field(pytree_node=False)


class Temperatures(enum.Enum):
    """The temperatures for which an acceptance rule is made."""

    ANY = "of at least 0"
    ZERO = "0"
    POSITIVE = "above 0"


class Verdict(struct.PyTreeNode):
    """What an acceptance rule decided.

    Attributes:
      num_accepted: drafts accepted, [b].
      next_token: the token that follows them, [b]: a residual or a bonus token.
      path: in a tree, the slots of the block that are kept, [b max_depth+1]: the last committed
        token, which is slot 0, and the accepted drafts. None for a chain.
    """

    num_accepted: RowCounts
    next_token: RowTokens
    path: Int32[Array, "b p"] | None = None


class AcceptanceRule(NamedTuple):
    """A rule that decides which drafts are accepted, as pure functions of arrays.

    The two probabilities stand apart from the noise, so that a test can enumerate all outcomes.

    Attributes:
      acceptance_probs: (target_probs, proposal) -> [b w], the probability that each draft is
        accepted once those before it are.
      next_token_probs: (target_probs, proposal, num_accepted [b]) -> [b v], the distribution of the
        token after this many accepted drafts.
      accept: (target_probs, proposal, noise) -> Verdict: the same with noise applied.
      noise: where the noise comes from.
      distribution: (logits, settings) -> target_probs, what the rule is told of the target.
      temperatures: those for which the rule is made.
      is_lossless: whether the emitted tokens follow the target's distribution at those
        temperatures.
      matches_at_zero: whether at temperature 0 it decides what `chain.match` decides, which needs
        no distribution over the vocabulary.
      draws_only: whether it only draws a token at each position, with that position's shared noise,
        and compares the draft with it: parts of the distributions will do.
      tree: the rule for trees, a `TreeRule`; None where it knows chains only.
    """

    acceptance_probs: Callable[[TargetProbs, Proposal], Float32[Array, "b w"]]
    next_token_probs: Callable[[TargetProbs, Proposal, RowCounts], Float32[Array, "b v"]]
    accept: Callable[[TargetProbs, Proposal, AcceptanceNoise], Verdict]
    noise: RoundNoise
    distribution: Callable[[Logits, SamplingSettings], TargetProbs] = sampling_probs
    temperatures: Temperatures = Temperatures.ANY
    is_lossless: bool = True
    matches_at_zero: bool = False
    draws_only: bool = False
    tree: Any = None


class TargetView(NamedTuple):
    """The target, read-only, for drafters that borrow from it.

    Every token but the last one is committed in its cache.
    """

    params: Params
    apply: ApplyFn
    cache: Any


class SourceView(NamedTuple):
    """The source of each row, once an encoder-decoder has read it.

    Attributes:
      inputs: what its encoder read: token ids [b s], or spectrograms [b frames mels].
      length: tokens or outputs of each row that count, [b].
      outputs: the encoder's, [b s d].
      constants: of the target's cross-attention, as its cache has them.
    """

    inputs: Array
    length: RowCounts
    outputs: Array
    constants: Any


LimitFn = Callable[[RowCounts], RowCounts]


class RoundInputs(NamedTuple):
    """What a drafter proposes from in one round, besides its own parameters and state.

    Attributes:
      last_token: the newest token, which no model has consumed yet, [b].
      limit: from the kinds of proposal [b] to the most drafts that each row wants, 0 to w. The
        drafter asks before it does the work.
      rng_keys: one for each draft; consumed. They are all equal where no row draws at random.
      settings: how the drafter samples; the processors have seen `last_token`.
      view: the target, to read.
      has_shared_noise: whether the keys are those of absolute positions, with which the target
        draws, too. In a tree, drafts of one depth then draw with the key of that depth.
      reads_probs: whether the rule will read the drafts' distributions in this round.
      is_free: the rows whose tokens are the same with any drafts, [b]. Elsewhere drafts must follow
        from the request alone, or its seed would give another text.
    """

    last_token: RowTokens
    limit: LimitFn
    rng_keys: Key[Array, "b w"]
    settings: SamplingSettings
    view: TargetView
    has_shared_noise: bool = False
    reads_probs: Bool[Array, ""] | bool = True
    is_free: RowFlags | bool = False

    def wanted(self) -> RowCounts:
        """Returns the most drafts that each row wants of a drafter with one kind, [b]."""
        return self.limit(jnp.zeros_like(self.last_token))

    def empty_probs(self, size: int) -> DraftProbs:
        """Returns distributions over `size` tokens for no drafts, [b w size]: zeros, if read."""
        return zeros_if(self.reads_probs, *self.rng_keys.shape, size)


class Drafter:
    """A source of drafts, as pure functions over a state of its own (every leaf per row).

    This base remembers nothing and asks for nothing; a subclass, usually a frozen dataclass, says
    what else it does. `propose`, `num_draft_tokens` and `kinds` have no default.

    Attributes:
      num_draft_tokens: width of its proposals, in drafts.
      kinds: the kinds of proposals it makes, one or more.
      may_be_silent: whether it may propose nothing; then a verify call without drafts is compiled
        too.
      tree_depth: the greatest depth of its trees; 0 if it drafts chains.
      hidden_layers: the target's layers whose outputs it observes, by the number of layers run; ()
        is the normed output of the last.
      num_runners_up: how many of the target's most likely tokens it observes after each token.
      has_lag: whether it may have to read tokens that it was shown before it can propose.
      reads_text: whether what it costs depends on the text: measured on one token repeated, it
        would be wrong.
      keeps_answers: whether its parameters hold earlier answers, which it looks up.
      can_roll_back: whether its state, cut to the first tokens of its text, is what these alone
        would have left: it has slots of tokens, lengths, and nothing that was counted up.
      has_slot_per_token: whether slot i of its caches follows from the first i + 2 tokens.
      summary: one line about how it was built; "" if there is nothing to say.
    """

    num_draft_tokens: int
    kinds: tuple[Kind, ...]
    may_be_silent: bool = True
    tree_depth: int = 0
    hidden_layers: tuple[int, ...] = ()
    num_runners_up: int = 0
    has_lag: bool = False
    reads_text: bool = False
    keeps_answers: bool = False
    can_roll_back: bool = False
    has_slot_per_token: bool = True
    summary: str = ""

    def init(self, batch_size: int, capacity: int) -> Any:
        """Returns the state of rows that have seen nothing."""
        return ()

    def observe(
        self, params: Params, state: Any, tokens: Tokens, hidden: Array, valid: BlockFlags
    ) -> Any:
        """Takes in newly committed tokens, of the prompt or of the output: each once and in order.

        Args:
          params: the drafter's parameters.
          state: its state.
          tokens: the next committed tokens, [b t].
          hidden: the target's hidden states at them, [b t d], or [b t l d]; see `hidden_layers`.
          valid: which tokens count: the first few of each row.
        """
        return state

    def read_source(self, params: Params, state: Any, source: SourceView) -> Any:
        """Takes in the source of an encoder-decoder, before the first token."""
        return state

    def observe_runners_up(
        self,
        state: Any,
        tokens: Tokens,
        runners_up: Int32[Array, "b t k"],
        is_fed: BlockFlags,
        is_kept: BlockFlags,
    ) -> Any:
        """Takes in what the target found likeliest after each token of a verify call's block.

        It is called before `observe`, where `num_runners_up` asks for it: with the newest token and
        the drafts, a chain or a tree, rejected ones included. Prefill shows nothing.

        Args:
          state: its state.
          tokens: of the block, [b t].
          runners_up: the likeliest tokens after each token, in order, [b t k].
          is_fed: leaves out padding, and rows that are done, [b t].
          is_kept: which tokens are committed, [b t].
        """
        return state

    def observe_logits(
        self, state: Any, tokens: Tokens, logits: Logits, is_fed: BlockFlags, is_kept: BlockFlags
    ) -> Any:
        """Calls `observe_runners_up` with the likeliest tokens by logits [b t v], if it asks."""
        if self.num_runners_up == 0:
            return state
        likeliest = best_tokens(logits, self.num_runners_up)
        return self.observe_runners_up(state, tokens, likeliest, is_fed, is_kept)

    def propose(self, params: Params, state: Any, inputs: RoundInputs) -> tuple[Proposal, Any]:
        """Proposes what follows `inputs.last_token`, which follows everything observed.

        Returns the proposal and the drafter's state after it. A row for which no draft is wanted
        may be left to lag: the drafter catches up when it is asked again.
        """
        raise NotImplementedError

    def lag(self, state: Any, kind: RowCounts) -> RowCounts:
        """Returns how many tokens it was shown and must still read before it can propose, [b].

        Perhaps rounded up to whole calls. It depends on the row's own history alone, as the row's
        choices follow from it.
        """
        return jnp.zeros_like(kind)


class ModelParams(NamedTuple):
    """Parameters of target and drafter."""

    target: Params
    draft: Params = None


class SpecState(struct.PyTreeNode):
    """Everything the next round needs; every leaf's first axis is the row.

    Attributes:
      target_cache: every token but the newest is committed in it.
      draft: the drafter's state.
      last_token: the newest token of each row, emitted but consumed by no model, [b].
      seed: of the row's request, [b].
      settings: how tokens are sampled; the processors have seen every token but the newest.
      draft_temperature: that at which the drafter samples, [b].
      draft_top_k: the drafter's top-k, [b]; None where the switch `draft_filters` is off, and the
        drafter's top-k and top-p are the target's.
      draft_top_p: the drafter's top-p, likewise.
      stop_ids: tokens that end a row, padded with -1, [b e].
      max_length: the most tokens a row may have, prompt included, [b].
      is_done: rows that commit and emit nothing any more, [b].
      control: chooses each row's number of drafts; None where that is fixed.
      last_logprobs: of the newest token where the prefill drew it; None if they are not wanted.
    """

    target_cache: Any
    draft: Any
    last_token: RowTokens
    seed: RowSeeds
    settings: SamplingSettings
    draft_temperature: Float32[Array, "b"]
    stop_ids: Int32[Array, "b e"]
    max_length: RowCounts
    is_done: RowFlags
    control: Control | None = None
    last_logprobs: TokenLogprobs | None = None
    draft_top_k: Int32[Array, "b"] | None = None
    draft_top_p: Float32[Array, "b"] | None = None

    @property
    def draft_settings(self) -> SamplingSettings:
        """How the drafter samples: as the target does, but for what has its own value."""
        settings = self.settings.replace(temperature=self.draft_temperature)
        if self.draft_top_k is None:
            return settings
        switches = settings.switches._replace(top_k=True, top_p=True)
        return settings.replace(top_k=self.draft_top_k, top_p=self.draft_top_p, switches=switches)


class StepInfo(struct.PyTreeNode):
    """What happened in one round: nothing that the next round needs.

    Attributes:
      tokens: the emitted tokens, [b w+1].
      num_tokens: how many of the tokens count, [b]; 0 for a row that was done.
      num_proposed: drafts proposed, [b], those after a row's end included: for the round in which a
        row ends, the smaller of this and `num_tokens` is to be counted.
      num_accepted: drafts accepted, [b], likewise.
      kind: of the proposal, [b].
      logprobs: of the emitted tokens; None if they are not wanted.
      drafts: those proposed, [b w]; of a tree all nodes. None in plain decoding.
      parents: a tree's, as in the `Proposal`.
    """

    tokens: Int32[Array, "b w+1"]
    num_tokens: RowCounts
    num_proposed: RowCounts
    num_accepted: RowCounts
    kind: RowCounts
    logprobs: TokenLogprobs | None = None
    drafts: Int32[Array, "b w"] | None = None
    parents: Int32[Array, "b w"] | None = None

"""The base of all drafters, and the state that passes from round to round."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32, Key

from jspec.common.typing import (
    ApplyFn,
    BlockFlags,
    DraftProbs,
    Logits,
    Params,
    RowCounts,
    RowFlags,
    RowSeeds,
    RowTokens,
    Tokens,
)
from jspec.kernels import zeros_if
from jspec.sampling.distribution import TokenLogprobs, best_tokens
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.acceptance.types import Proposal
from jspec.speculation.control import Control, Kind


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
    can_roll_back: bool = False
    has_slot_per_token: bool = True
    summary: str = ""

    def init(self, batch_size: int, capacity: int) -> Any:
        """Returns the state of rows that have seen nothing."""
        return ()

    def observe(
        self, params: Params, state: Any, tokens: Tokens, hidden: Array, valid: BlockFlags
    ) -> Any:
        """Takes in newly committed tokens, of the prompt or of the output.

        It sees every token of prompt and answer, once and in order, so its caches and tables have
        no hole.

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
        the drafts, a chain or a tree. The target's predictions after rejected drafts count as well
        as those after accepted drafts. Prefill, which computes logits at the prompt's last token
        alone, shows nothing.

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

        A row for which no draft is wanted may be left to lag: the drafter catches up when it is
        asked again.

        Returns:
          The proposal, and the drafter's state after it.
        """
        raise NotImplementedError

    def lag(self, state: Any, kind: RowCounts) -> RowCounts:
        """Returns how many tokens it must still read before it can propose, [b].

        These are tokens that it was shown and did not consume, perhaps rounded up to whole calls.
        The number depends on the row's own history alone, since the row's choices follow from it.
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
      num_proposed: drafts proposed, [b]. It includes drafts after a row's end: for the round in
        which a row ends, the smaller of this and `num_tokens` is to be counted.
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

"""The data that passes between drafter, target and acceptance rule."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32, Key

from jspec.common.typing import ApplyFn, Params, RowCounts, RowFlags, RowSeeds, RowTokens, Tokens
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.acceptance.types import Proposal
from jspec.speculation.control import Control, Kind
from jspec.speculation.logprobs import TokenLogprobs


class TargetView(NamedTuple):
    """A read-only look at the target, for drafters that borrow from it.

    Attributes:
      params: the target's parameters.
      apply: its ApplyFn.
      cache: its cache, everything before the last token committed.
    """

    params: Params
    apply: ApplyFn
    cache: Any


LimitFn = Callable[[RowCounts], RowCounts]


@runtime_checkable
class Drafter(Protocol):
    """A source of drafts, as pure functions over its own state (every leaf per row)."""

    @property
    def num_draft_tokens(self) -> int:
        """Width of its proposals."""
        ...

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of its proposals; at least one."""
        ...

    @property
    def may_be_silent(self) -> bool:
        """Whether it may have nothing to propose: a narrow verify call is then compiled too."""
        ...

    def init(self, batch_size: int, capacity: int) -> Any:
        """Returns the state of rows that have seen nothing."""
        ...

    def observe(
        self,
        params: Params,
        state: Any,
        tokens: Tokens,
        hidden: Array,
        valid: Bool[Array, "b t"],
    ) -> Any:
        """Takes in tokens that are now committed, of the prompt or of the output.

        Args:
          params: the drafter's parameters.
          state: its state.
          tokens: the next committed tokens, [b t].
          hidden: the target's hidden states at them, [b t d], or [b t l d]; see
            `observed_layers`.
          valid: which of them count: the first so many of each row.
        """
        ...

    def propose(
        self,
        params: Params,
        state: Any,
        last_token: RowTokens,
        *,
        limit: LimitFn,
        rng_keys: Key[Array, "b w"],
        settings: SamplingSettings,
        view: TargetView,
    ) -> tuple[Proposal, Any]:
        """Proposes what follows `last_token`, which follows everything observed.

        A row of which nothing is wanted may be left to lag: the drafter then catches up when it is
        asked again.

        Args:
          params: the drafter's parameters.
          state: its state.
          last_token: the newest token, which no model has consumed yet, [b].
          limit: how many drafts of each row are wanted at most, 0 to w, from a proposal of the
            given kinds [b]: to be asked before the work is done.
          rng_keys: one for each draft; consumed. All the same where the settings draw nothing at
            random.
          settings: how the drafter samples; the processors have seen `last_token`.
          view: the target, to read.
        """
        ...


def lag_of(drafter: Drafter, state: Any, kind: RowCounts) -> RowCounts:
    """Returns how many tokens a drafter has yet to read before it can propose, [b].

    Those that it was shown and did not consume; it may round them up to whole calls. It is a
    function of the row's own history, since the row's choices follow from it. A drafter says it in
    a method `lag` of state and kind; one without that never lags.

    Args:
      drafter: the drafter.
      state: its state.
      kind: of each row's proposal, [b].
    """
    lag = getattr(drafter, "lag", None)
    if lag is None:
        return jnp.zeros_like(kind)
    return lag(state, kind)


def observed_layers(drafter: Drafter | None) -> tuple[int, ...]:
    """Returns the layers of the target whose outputs a drafter observes, its `hidden_layers`.

    A drafter that says nothing about it is shown the normed output, which costs nothing.
    """
    return getattr(drafter, "hidden_layers", ())


class ModelParams(NamedTuple):
    """Parameters of the two sides of a round."""

    target: Params
    draft: Params = None


class SpecState(struct.PyTreeNode):
    """Everything the next round needs; every leaf's first axis is the row.

    Attributes:
      target_cache: holds every token but the newest.
      draft: the drafter's state.
      last_token: the newest token of each row, emitted but consumed by no model, [b].
      seed: of the row's request, [b].
      settings: how tokens are sampled; the processors have seen every token but the newest.
      draft_temperature: the drafter's own, [b].
      stop_ids: tokens that end a row, padded with -1, [b e].
      max_length: tokens a row may come to, prompt included, [b].
      is_done: rows that write and emit nothing, [b].
      control: chooses each row's number of drafts; None where it is fixed.
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


class StepInfo(struct.PyTreeNode):
    """What one round did, for people.

    Attributes:
      tokens: the emitted tokens, [b w+1].
      num_tokens: how many of them count, [b]; 0 for a row that was done.
      num_proposed: drafts put forward, [b]. Drafts after a row's end are counted here too: for the
        round in which a row ends, whoever counts takes the smaller of this and `num_tokens`.
      num_accepted: drafts kept, [b], likewise.
      kind: of the proposal, [b].
      logprobs: of the emitted tokens; None if they are not wanted.
    """

    tokens: Int32[Array, "b w+1"]
    num_tokens: RowCounts
    num_proposed: RowCounts
    num_accepted: RowCounts
    kind: RowCounts
    logprobs: TokenLogprobs | None = None

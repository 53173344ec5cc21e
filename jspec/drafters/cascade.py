"""Several drafters in order: in each row the first that has a draft proposes.

    lookup  | found a match | nothing       | found         of four rows, one round
    model   | lags          | proposes      | lags

Every member sees every committed token. One that was not asked leaves its cache where it was and
catches up when it is asked again: no member ever has a hole, and a draft model's prompt is only
consumed when the cheaper members fall silent. A row's distribution is that of the member that
proposed.

A member that calls the target hands its cache on to the next ones and to the verify call, whoever
has proposed: to go back to the cache from before would copy it.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jspec.common.typing import BlockFlags, Params, RowCounts, RowFlags, Tokens
from jspec.drafters.memory import hand_on
from jspec.speculation.acceptance.types import Proposal, as_tree
from jspec.speculation.runners_up import num_runners_up
from jspec.speculation.types import (
    Drafter,
    Kind,
    LimitFn,
    RoundInputs,
    lag_of,
    observed_layers,
    tree_depth,
)

_States = tuple[Any, ...]
_Flag = Bool[Array, ""] | bool


@dataclasses.dataclass(frozen=True)
class CascadeDrafter:
    """Asks its members in order. Its parameters and its state are tuples, one entry a member."""

    members: tuple[Drafter, ...]

    @property
    def num_draft_tokens(self) -> int:
        """The widest member's."""
        return max(member.num_draft_tokens for member in self.members)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Those of the members, one after another."""
        return tuple(kind for member in self.members for kind in member.kinds)

    @property
    def may_be_silent(self) -> bool:
        """Silent if every member is."""
        return all(member.may_be_silent for member in self.members)

    @property
    def tree_depth(self) -> int:
        """The deepest member's, where a chain is a tree of one branch; 0 if all draft chains."""
        if not any(map(tree_depth, self.members)):
            return 0
        return max(tree_depth(member) or member.num_draft_tokens for member in self.members)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The target's layers that the members observe, one member after another."""
        return tuple(i for member in self.members for i in observed_layers(member))

    @property
    def num_runners_up(self) -> int:
        """As many as the member that observes most of them."""
        return max(map(num_runners_up, self.members))

    def lag(self, state: _States, kind: RowCounts) -> RowCounts:
        """Returns what the member of each row's kind has yet to read, [b]; see `lag_of`."""
        lag, first_kind = jnp.zeros_like(kind), 0
        for member, own in zip(self.members, state, strict=True):
            # Kinds are numbered across the members; a member knows its own from 0.
            own_kind = kind - first_kind
            is_own = (own_kind >= 0) & (own_kind < len(member.kinds))
            lag = jnp.where(is_own, lag_of(member, own, own_kind), lag)
            first_kind += len(member.kinds)
        return lag

    def init(self, batch_size: int, capacity: int) -> _States:
        """Returns the state of rows that have seen nothing."""
        return tuple(member.init(batch_size, capacity) for member in self.members)

    def observe(
        self, params: Params, state: _States, tokens: Tokens, hidden: Array, valid: BlockFlags
    ) -> _States:
        """Shows every member the committed tokens, and the hidden states that it asked for."""
        states, first = [], 0
        for member, own_params, own in zip(self.members, params, state, strict=True):
            end = first + len(observed_layers(member))
            # A member that observes no layer ignores what it is shown.
            shown = hidden[:, :, first:end] if end > first else hidden
            states.append(member.observe(own_params, own, tokens, shown, valid))
            first = end
        return tuple(states)

    def observe_runners_up(
        self,
        state: _States,
        tokens: Tokens,
        runners_up: Int32[Array, "b t k"],
        is_fed: BlockFlags,
        is_kept: BlockFlags,
    ) -> _States:
        """Shows the members that ask for them what the target found likeliest."""
        states = []
        for member, own in zip(self.members, state, strict=True):
            if count := num_runners_up(member):
                shown = runners_up[..., :count]
                own = member.observe_runners_up(own, tokens, shown, is_fed, is_kept)  # type: ignore
            states.append(own)
        return tuple(states)

    def propose(
        self, params: Params, state: _States, inputs: RoundInputs
    ) -> tuple[Proposal, _States]:
        """Asks each member for the rows that the earlier ones leave open: that had no draft."""
        last_token, view = inputs.last_token, inputs.view
        is_open = jnp.ones_like(last_token, bool)
        proposals, turns, states, first_kind = [], [], [], 0
        for member, own_params, own in zip(self.members, params, state, strict=True):
            own_inputs = inputs._replace(
                limit=functools.partial(_own_limit, member, inputs.limit, first_kind, is_open),
                # A member's drafts take the keys of their own offsets, whichever member proposes.
                rng_keys=inputs.rng_keys[:, : member.num_draft_tokens],
                view=view,
            )
            proposal, new = member.propose(own_params, own, own_inputs)
            kind = jnp.zeros_like(last_token) if proposal.kind is None else proposal.kind
            # The first member with a draft has the row; later ones are asked for none.
            is_turn = is_open & (proposal.num_tokens > 0)
            proposals.append(proposal := proposal.replace(kind=kind + first_kind))
            turns.append(is_turn)
            states.append(new)
            # This member wrote into the target's cache: later calls go on from there.
            if proposal.prefix is not None:
                view = view._replace(cache=proposal.prefix.cache)
            is_open &= self.leaves_open(proposal, is_turn)
            first_kind += len(member.kinds)
        merged = self.merge(proposals, turns, inputs.reads_probs)
        # By identity: a member that wrote to the cache has left another view.
        if view is not inputs.view:
            merged = merged.replace(prefix=hand_on(view, last_token, merged.tokens))
        return merged, tuple(states)

    def leaves_open(self, proposal: Proposal, is_turn: RowFlags) -> RowFlags:
        """Returns the rows in which the next members are asked after this proposal, [b]."""
        return ~is_turn

    def merge(
        self, proposals: Sequence[Proposal], turns: Sequence[RowFlags], reads_probs: _Flag
    ) -> Proposal:
        """Takes each row from the member whose turn it was; where nobody's, it proposes nothing."""
        first = proposals[0]
        tokens, num_tokens, kind = self._widen(first.tokens), first.num_tokens, first.kind
        for proposal, is_turn in zip(proposals[1:], turns[1:], strict=True):
            tokens = jnp.where(is_turn[:, None], self._widen(proposal.tokens), tokens)
            num_tokens = jnp.where(is_turn, proposal.num_tokens, num_tokens)
            kind = jnp.where(is_turn, proposal.kind, kind)  # type: ignore[arg-type]
        probs = self._merge_distributions(proposals, tokens, reads_probs)
        merged = Proposal(tokens, num_tokens, probs, kind)
        if all(proposal.parents is None for proposal in proposals):
            return merged
        return self._merge_trees(merged, [as_tree(proposal) for proposal in proposals], turns)

    def _merge_trees(
        self, merged: Proposal, trees: Sequence[Proposal], turns: Sequence[RowFlags]
    ) -> Proposal:
        # Where any member proposes a tree, the chains of the others are trees of one branch.
        parents = jnp.zeros_like(merged.tokens)
        for proposal, is_turn in zip(trees, turns, strict=True):
            own = self._widen(proposal.parents)  # type: ignore[arg-type]
            parents = jnp.where(is_turn[:, None], own, parents)
        return merged.replace(parents=parents, max_depth=max(tree.max_depth for tree in trees))

    def _merge_distributions(
        self, proposals: Sequence[Proposal], tokens: Tokens, is_read: _Flag
    ) -> Array | None:
        # Only one member proposes for a row, and the others' rows are zeros: a sum merges them.
        distributions = [self._widen(p.probs) for p in proposals if p.probs is not None]
        if not distributions:
            return None
        # Without a start value of 0, which would be one more array to add.
        merged = sum(distributions[1:], distributions[0])
        counts = [p.num_tokens for p in proposals if p.probs is None]
        if not counts:
            return merged
        # Where it was not their turn counts are 0: nothing was found, or nothing was wanted.
        num_certain = sum(counts[1:], counts[0])
        # Drafts without a distribution are certain: probability 1 on the token itself.
        is_certain = (jnp.arange(tokens.shape[1]) < num_certain[:, None]) & (tokens >= 0)
        rows, slots = jnp.indices(tokens.shape)

        def with_certain() -> Array:
            return merged.at[rows, slots, tokens].add(is_certain.astype(jnp.float32))

        return jax.lax.cond(is_read, with_certain, lambda: merged)

    def _widen(self, leaf: Array) -> Array:
        # All proposals get the widest member's width: shapes must agree to be merged.
        missing = self.num_draft_tokens - leaf.shape[1]
        return jnp.pad(leaf, [(0, 0), (0, missing), *[(0, 0)] * (leaf.ndim - 2)])


def _own_limit(
    member: Drafter, limit: LimitFn, first_kind: int, is_open: RowFlags, kind: RowCounts
) -> RowCounts:
    """Returns a member's limit: its kinds are counted from 0, and it may not be its turn."""
    wanted = jnp.minimum(limit(kind + first_kind), member.num_draft_tokens)
    # 0 for a row that is taken: a draft model then lags there and need not catch up.
    return jnp.where(is_open, wanted, 0)

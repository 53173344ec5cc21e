"""Several drafters in order: in each row the first that has a draft proposes.

    lookup  | found a match | nothing       | found         of four rows, one round
    model   | lags          | proposes      | lags

Every member sees every committed token. One that was not asked leaves its cache where it was and
catches up when it is asked again. A row's distribution is that of the member that proposed. A
member that calls the target hands its cache on to the next ones and to the verify call, whoever has
proposed: to go back to the cache from before would copy it.

With `tree_depth` the members share one tree, where all drafts are certain (SpecInfer, arXiv
2305.09781).

    lookup   a ── b ── c        0.5 0.4 0.3
    head     a ─┬─ b            0.6 0.3            merged   a ─┬─ b ── c
             e  └─ d            0.2   0.1                   e  └─ d

A node's score is the logarithm of an estimate of the probability that the target says its whole
path: a head's are its probabilities, those of a chain follow from its kind, as a longer match is
followed more faithfully. Drafts that begin alike are one path, for which the largest estimate
counts, and the best nodes of all are put forward. Where a member is sure, later ones are not asked.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jspec.common.typing import BlockFlags, Params, RowCounts, RowFlags, Tokens
from jspec.drafters.branches import branches_of, join_branches, merge_branches
from jspec.drafters.memory import hand_on
from jspec.drafters.options import LIKELIEST
from jspec.drafters.spec import BuiltDrafter
from jspec.speculation.types import (
    Drafter,
    Kind,
    LimitFn,
    Proposal,
    RoundInputs,
    SourceView,
    as_tree,
)

_States = tuple[Any, ...]
_Flag = Bool[Array, ""] | bool


def _of_members(combine: Callable[[Iterable[Any]], Any], name: str) -> Any:
    """Returns a property: what a cascade says of itself follows from what its members say."""
    return property(lambda self: combine(getattr(member, name) for member in self.members))


@dataclasses.dataclass(frozen=True)
class CascadeDrafter(Drafter):
    """Asks its members in order. Its parameters and its state are tuples, one entry a member."""

    members: tuple[Drafter, ...]

    num_draft_tokens = _of_members(max, "num_draft_tokens")
    num_runners_up = _of_members(max, "num_runners_up")
    has_lag = _of_members(any, "has_lag")
    reads_text = _of_members(any, "reads_text")
    keeps_answers = _of_members(any, "keeps_answers")
    may_be_silent = _of_members(all, "may_be_silent")
    can_roll_back = _of_members(all, "can_roll_back")
    has_slot_per_token = _of_members(all, "has_slot_per_token")

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Those of the members, one after another."""
        return tuple(kind for member in self.members for kind in member.kinds)

    @property
    def summary(self) -> str:
        """Those of the members."""
        return "; ".join(member.summary for member in self.members if member.summary)

    @property
    def tree_depth(self) -> int:
        """The deepest member's, where a chain is a tree of one branch; 0 if all draft chains."""
        if not any(member.tree_depth for member in self.members):
            return 0
        return max(member.tree_depth or member.num_draft_tokens for member in self.members)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The target's layers that the members observe, one member after another."""
        return tuple(i for member in self.members for i in member.hidden_layers)

    def lag(self, state: _States, kind: RowCounts) -> RowCounts:
        """Returns what the member of each row's kind has yet to read, [b]."""
        lag, first_kind = jnp.zeros_like(kind), 0
        for member, member_state in zip(self.members, state, strict=True):
            # Kinds are numbered across the members; a member knows its own from 0.
            member_kind = kind - first_kind
            is_own = (member_kind >= 0) & (member_kind < len(member.kinds))
            lag = jnp.where(is_own, member.lag(member_state, member_kind), lag)
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
        for member, member_params, member_state in zip(self.members, params, state, strict=True):
            end = first + len(member.hidden_layers)
            # A member that observes no layer ignores what it is shown.
            shown = hidden[:, :, first:end] if end > first else hidden
            states.append(member.observe(member_params, member_state, tokens, shown, valid))
            first = end
        return tuple(states)

    def read_source(self, params: Params, state: _States, source: SourceView) -> _States:
        """Shows every member the source."""
        return tuple(
            member.read_source(member_params, member_state, source)
            for member, member_params, member_state in zip(self.members, params, state, strict=True)
        )

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
        for member, member_state in zip(self.members, state, strict=True):
            shown = runners_up[..., : member.num_runners_up]
            states.append(member.observe_runners_up(member_state, tokens, shown, is_fed, is_kept))
        return tuple(states)

    def propose(
        self, params: Params, state: _States, inputs: RoundInputs
    ) -> tuple[Proposal, _States]:
        """Asks each member for the rows that the earlier ones leave open: that had no draft."""
        last_token, view = inputs.last_token, inputs.view
        is_open = jnp.ones_like(last_token, bool)
        proposals, turns, states, first_kind = [], [], [], 0
        for member, member_params, member_state in zip(self.members, params, state, strict=True):
            member_inputs = inputs._replace(
                limit=functools.partial(_own_limit, member, inputs.limit, first_kind, is_open),
                # A member's drafts take the keys of their own offsets, whichever member proposes.
                rng_keys=inputs.rng_keys[:, : member.num_draft_tokens],
                view=view,
            )
            proposal, new = member.propose(member_params, member_state, member_inputs)
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
            member_parents = self._widen(proposal.parents)  # type: ignore[arg-type]
            parents = jnp.where(is_turn[:, None], member_parents, parents)
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
        # Where it was not their turn counts are 0: there was nothing to propose, or nothing wanted.
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


# Where a first draft is kept this often, a head in addition costs more than it brings: SmolLM2.
_SURE = 0.75


@dataclasses.dataclass(frozen=True)
class MergedCascadeDrafter(CascadeDrafter):
    """Merges what its members propose; see `CascadeDrafter`."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Those of the members; what several propose together has that of the most expensive."""
        kinds = super().kinds
        # A path may begin as one member has it and go on as another does.
        most = max(min(kind.most, self.num_draft_tokens) for kind in kinds)
        # All of them end up in one tree, for which no member has to make way for a better member.
        changes = {"most": most, "is_tree": True, "is_certain": False}
        return tuple(kind._replace(**changes) for kind in kinds)

    def leaves_open(self, proposal: Proposal, is_turn: RowFlags) -> RowFlags:
        """Returns the rows in which the next members are asked, too: where this one is not sure."""
        is_sure = jnp.array([kind.first >= _SURE for kind in self.kinds])[proposal.kind]
        return ~(is_turn & is_sure)

    def propose(
        self, params: Params, state: tuple[Any, ...], inputs: RoundInputs
    ) -> tuple[Proposal, tuple[Any, ...]]:
        """Asks each member for the rows in which no earlier one is sure."""
        proposal, states = super().propose(params, state, inputs)
        # Each member has kept to the limit alone. What is drafted is not given up any more.
        kinds = range(len(self.kinds))
        limits = [inputs.limit(jnp.full_like(inputs.last_token, kind)) for kind in kinds]
        limit = functools.reduce(jnp.maximum, limits)
        return proposal.replace(num_tokens=jnp.minimum(proposal.num_tokens, limit)), states

    def merge(
        self, proposals: Sequence[Proposal], turns: Sequence[RowFlags], reads_probs: Any
    ) -> Proposal:
        """Returns the best drafts of all members, which have no distributions."""
        del reads_probs
        rates = jnp.array([(kind.first, kind.later) for kind in self.kinds], jnp.float32)
        # Those that propose whenever they are asked are models and heads: the round costs as they
        # do, and what is kept decides whether they are asked again.
        kinds = (kind for member in self.members for kind in member.kinds)
        is_model = jnp.array([kind_.is_certain for kind_ in kinds])
        parts, kind = [], jnp.full_like(proposals[0].num_tokens, -1)
        for proposal, is_turn in zip(proposals, turns, strict=True):
            assert proposal.kind is not None
            first, later = rates[proposal.kind].T
            parts.append(branches_of(proposal, first, later))
            is_like = (kind < 0) | is_model[proposal.kind] | ~is_model[jnp.maximum(kind, 0)]
            kind = jnp.where(is_turn & is_like, proposal.kind, kind)
        most = jnp.full_like(kind, self.num_draft_tokens)
        silent, is_open = [], jnp.ones_like(turns[0])
        for member, proposal, is_turn in zip(self.members, proposals, turns, strict=True):
            # A model that was too unsure has run, whoever else proposes; `auto` is to know it.
            silent += [is_open & ~is_turn] * len(member.kinds)
            is_open &= self.leaves_open(proposal, is_turn)
        tree = merge_branches(join_branches(parts), self.num_draft_tokens, most)
        return tree.replace(kind=jnp.maximum(kind, 0), silent=jnp.stack(silent, axis=1))


def join_members(
    built: Sequence[BuiltDrafter], draws: Sequence[bool], tree_draws: str
) -> BuiltDrafter:
    """Returns the cascade of several drafters in their order.

    `draws` says which of them draw their drafts from a distribution, `tree_draws` how the drafts of
    their trees are chosen.
    """
    # `member_names` has refused "none", so members and parameters stay aligned.
    drafters = tuple(member.drafter for member in built if member.drafter is not None)
    # What is drawn from a distribution has its own siblings, and is not merged.
    is_drawn = tree_draws != LIKELIEST or any(
        draws_drafts and not drafter.tree_depth
        for draws_drafts, drafter in zip(draws, drafters, strict=True)
    )
    is_merged = not is_drawn and any(drafter.tree_depth for drafter in drafters)
    cascade = MergedCascadeDrafter if is_merged else CascadeDrafter
    return BuiltDrafter(cascade(drafters), tuple(member.params for member in built))

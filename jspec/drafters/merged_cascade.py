"""A cascade whose members share one tree: with `tree_depth`, where all drafts are certain.

    lookup   a ── b ── c        0.5 0.4 0.3
    head     a ─┬─ b            0.6 0.3            merged   a ─┬─ b ── c
             e  └─ d            0.2   0.1                   e  └─ d

Every member's drafts carry estimates of how likely each is kept: a head's are its probabilities,
those of a chain follow from its kind, as a longer match is followed more faithfully. The best ones
of all members are put forward. Where a member is sure, later ones are not asked, and a head does
not run.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jspec.common.typing import Params, RowFlags
from jspec.drafters.cascade import CascadeDrafter
from jspec.drafters.merged_tree import branches_of, join_branches, merge_branches
from jspec.speculation.acceptance.types import Proposal
from jspec.speculation.kinds import Kind
from jspec.speculation.types import RoundInputs

# Where a first draft is kept this often, a head in addition costs more than it brings: SmolLM2.
_SURE = 0.75


@dataclasses.dataclass(frozen=True)
class MergedCascadeDrafter(CascadeDrafter):
    """Merges what its members propose; see `CascadeDrafter`."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Those of the members; what several propose together has that of the most expensive."""
        own = super().kinds
        # A path may begin as one member has it and go on as another does.
        most = max(min(kind.most, self.num_draft_tokens) for kind in own)
        # All of them end up in one tree, for which no member has to make way for a better one.
        changes = {"most": most, "is_tree": True, "is_certain": False}
        return tuple(kind._replace(**changes) for kind in own)

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
        own = (kind for member in self.members for kind in member.kinds)
        is_model = jnp.array([one.is_certain for one in own])
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

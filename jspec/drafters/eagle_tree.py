"""A trained head that drafts a tree: `eagle` with `tree_depth` (EAGLE-2, arXiv 2406.16858).

    pairs    | (f0 t1) ... (fn-1 last) | level 1: (h d) × k | level 2: (h d) × k | ...

The drafts of a level are fed in one call, each with the head's output at its parent as feature, and
under a mask. None of their pairs is kept: committed tokens bring the target's features along.
"""

import dataclasses
import functools

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float32

from jspec.common.typing import Params, RowCounts
from jspec.drafters.dynamic_tree import Fed, if_wanted
from jspec.drafters.eagle import Drafting, EagleDrafter, EagleState
from jspec.drafters.sampled_tree import make_tree
from jspec.drafters.tree_options import DraftingTrees, Shape
from jspec.models import KVCache
from jspec.speculation.acceptance.types import Proposal
from jspec.speculation.types import RoundInputs


class _Level(struct.PyTreeNode):
    """The head in the middle of a tree."""

    cache: KVCache
    hidden: Float32[Array, "b k d"]  # its outputs at the level before


@dataclasses.dataclass(frozen=True)
class EagleTreeDrafter(DraftingTrees, EagleDrafter):
    """Proposes a tree of what the head finds likeliest, or of what it draws.

    Attributes:
      shape: of the tree.
    """

    shape: Shape = dataclasses.field(kw_only=True)

    @property
    def most_committed(self) -> int:
        """The most tokens that a round commits: the last one, and a path."""
        return self.shape.depth + 1

    def init(self, batch_size: int, capacity: int) -> EagleState:
        """Returns the state of rows that have seen nothing."""
        # With room for the drafts that are fed, of which there are more than are put forward.
        return super().init(batch_size, capacity + self.shape.num_fed)

    def propose(
        self, params: Params, state: EagleState, inputs: RoundInputs
    ) -> tuple[Proposal, EagleState]:
        """Grows a tree, level by level."""
        wanted = inputs.wanted()
        grow = functools.partial(self._grow, params, inputs, wanted)
        return if_wanted(grow, state, wanted)

    def _grow(
        self, params: Params, inputs: RoundInputs, wanted: RowCounts, state: EagleState
    ) -> tuple[Proposal, EagleState]:
        before = self.catch_up(params, state, inputs, wanted)
        logits, drafting = self.first_call(params, state, inputs, wanted, before)

        def feed(memory: _Level, level: Fed) -> tuple[Float32[Array, "b k u"], _Level]:
            features = jnp.take_along_axis(memory.hidden, level.parents[..., None], axis=1)
            logits, hidden, cache = self.feed(
                params, inputs, level.tokens, features, memory.cache,
                positions=level.positions(memory.cache.length), block_mask=level.mask,
            )  # fmt: skip
            return logits, _Level(cache, hidden)

        grown = make_tree(
            self, self.shape, feed, _level_of(drafting), logits, inputs, wanted=wanted,
            ids=params["ids"],
        )  # fmt: skip
        return grown.proposal, self.forget_guesses(state, before.length, grown.memory.cache, wanted)


def _level_of(drafting: Drafting) -> _Level:
    """Returns the root as a level of one draft."""
    return _Level(drafting.cache, drafting.hidden[:, None])

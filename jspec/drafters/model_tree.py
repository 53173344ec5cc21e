"""A second model that drafts a tree: `model` with `tree_depth`.

    cache   | committed tokens | last | level 1: k drafts | level 2: k drafts | ...

The drafts of a level are fed in one call, under a mask. What is committed afterwards is a path of
what was fed, in slots that do not lie together; the drafter moves them together itself.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jspec.common.typing import BlockFlags, Params, RowCounts, Tokens
from jspec.drafters.dynamic_tree import Fed, if_wanted
from jspec.drafters.memory import History
from jspec.drafters.model import ModelDrafter, ModelState
from jspec.drafters.sampled_tree import make_tree
from jspec.drafters.tree_options import DraftingTrees, Shape
from jspec.models import KVCache
from jspec.speculation.acceptance.tree import kept_path, tree_of
from jspec.speculation.acceptance.types import Proposal
from jspec.speculation.types import RoundInputs


class ModelTreeState(ModelState):
    """The drafter's memory of the committed tokens; `fed` are the drafts that were fed, [b f]."""

    last: Int32[Array, "b"]  # the token that was fed before them; -1 if none was
    parents: Int32[Array, "b f"]  # of the drafts that were fed, among them; -1 is `last`


@dataclasses.dataclass(frozen=True)
class ModelTreeDrafter(DraftingTrees, ModelDrafter):
    """Proposes a tree of what a draft model finds likeliest, or of what it draws.

    Attributes:
      shape: of the tree.
    """

    shape: Shape = dataclasses.field(kw_only=True)

    def init(self, batch_size: int, capacity: int) -> ModelTreeState:
        """Returns the state of rows that have seen nothing."""
        none = jnp.full([batch_size, self.shape.num_fed], -1, jnp.int32)
        return ModelTreeState(
            history=History.init(batch_size, capacity),
            cache=self.init_cache(batch_size, capacity + self.shape.num_fed),
            last=jnp.full([batch_size], -1, jnp.int32),
            fed=none,
            parents=none,
        )

    def observe(
        self, params: Params, state: ModelTreeState, tokens: Tokens, hidden: Array,
        valid: BlockFlags,
    ) -> ModelTreeState:  # fmt: skip
        """Remembers committed tokens; a path of those that were fed counts as cached."""
        is_fed = (state.last == tokens[:, 0]) & valid[:, 0]
        is_fed &= state.cache.length == state.history.length
        path, num_drafts = self._fed_path(state, tokens[:, 1:], valid[:, 1:])
        return state.replace(
            history=state.history.append(tokens, valid),
            cache=state.cache.commit(jnp.where(is_fed, 1 + num_drafts, 0), path),
            last=jnp.full_like(state.last, -1),
            fed=jnp.full_like(state.fed, -1),
        )

    def _fed_path(
        self, state: ModelTreeState, tokens: Tokens, valid: BlockFlags
    ) -> tuple[Int32[Array, "b p"], RowCounts]:
        """Returns the slots after the committed ones that hold what was committed, in order."""
        b, size = state.fed.shape
        everything = jnp.full([b], size, jnp.int32)
        depth = self.shape.depth - 1
        fed = tree_of(Proposal(state.fed, everything, parents=state.parents, max_depth=depth))
        # What was committed at each draft's depth, -2 beyond its end: nothing that was fed is -2.
        committed = jnp.where(valid, tokens, -2)[:, :depth]
        committed = jnp.pad(
            committed, ((0, 0), (0, depth - committed.shape[1])), constant_values=-2
        )
        expected = jnp.take_along_axis(committed, fed.depths[:, 1:] - 1, axis=1)
        return kept_path(fed, expected == state.fed)

    def propose(
        self, params: Params, state: ModelTreeState, inputs: RoundInputs
    ) -> tuple[Proposal, ModelTreeState]:
        """Grows a tree, level by level."""
        wanted = inputs.wanted()
        grow = functools.partial(self._grow, params, inputs, wanted)
        return if_wanted(grow, state, wanted)

    def _grow(
        self, params: Params, inputs: RoundInputs, wanted: RowCounts, state: ModelTreeState
    ) -> tuple[Proposal, ModelTreeState]:
        history = state.history
        is_wanted = wanted > 0
        cache = self.ready_cache(params, state, is_wanted)
        block = jnp.stack([history.newest(), inputs.last_token], axis=1)
        at = jnp.ones_like(wanted)
        logits, _, cache = self.apply(params, block, cache, logits_at=at)
        cache = cache.commit(2 * at)

        def feed(cache: KVCache, level: Fed) -> tuple[Float32[Array, "b k u"], KVCache]:
            logits, _, cache = self.apply(
                params,
                level.tokens,
                cache,
                positions=level.positions(cache.length),
                block_mask=level.mask,
            )
            return logits[..., : self.vocab_size], cache

        grown = make_tree(
            self, self.shape, feed, cache, logits[:, 0, : self.vocab_size], inputs, wanted=wanted,
            ids=self.ids(params),
        )  # fmt: skip
        length = jnp.where(is_wanted, history.length, state.cache.length)
        return grown.proposal, state.replace(
            cache=grown.memory.rollback(length),
            last=jnp.where(is_wanted, inputs.last_token, -1),
            fed=grown.fed,
            parents=grown.fed_parents,
        )

"""Drafters whose one pass gives the logits of all drafts.

Each draft is drawn from its own distribution, which is what the proposal reports, so every rule
stays exact. With `tree_depth` the tree is grown without another pass, as in DDTree (arXiv
2604.12989): a path's score is the product of what the levels say of its tokens.
"""

import dataclasses

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float32, Int32

from jspec.common.typing import Params, RowCounts, RowTokens
from jspec.drafters.chain import SureFn
from jspec.drafters.features import FeatureState, ReadingFeatures
from jspec.drafters.trees import Fed, make_tree, propose_grown
from jspec.models.cache import KVCache
from jspec.speculation.types import Proposal, RoundInputs


class DraftedBlock(struct.PyTreeNode):
    """What one pass over a block has said of its drafts.

    Attributes:
      cache: the drafter's.
      logits: of each draft, among the tokens that the head can propose, [b w u].
      index: of the draft that is next.
      hidden: what the head reads, [b w d]; None where nothing else reads it.
    """

    cache: KVCache
    logits: Float32[Array, "b w u"]
    index: Int32[Array, ""]
    hidden: Float32[Array, "b w d"] | None = None


@dataclasses.dataclass(frozen=True)
class BlockDrafter(ReadingFeatures):
    """Proposes a chain of which all distributions come from one pass, or a tree of them."""

    @property
    def block_width(self) -> int:
        """Drafts of the block that it reads: of a tree one a level."""
        return self.tree_depth or self.num_draft_tokens

    def read_block(
        self,
        params: Params,
        state: FeatureState,
        inputs: RoundInputs,
        wanted: RowCounts,
        cache: KVCache,
    ) -> DraftedBlock:
        """Reads what the last round committed, and then the block."""
        raise NotImplementedError

    def after(
        self, params: Params, logits: Float32[Array, "b k u"], tokens: Int32[Array, "b k"]
    ) -> Float32[Array, "b k u"]:
        """Returns a draft's logits, given the tokens before it."""
        return logits

    def sure_of(self, params: Params) -> SureFn | None:
        """Returns what says whether to go on; None for the distribution's largest probability."""
        return None

    def empty_block(
        self, params: Params, state: FeatureState, inputs: RoundInputs, wanted: RowCounts
    ) -> DraftedBlock:
        """Returns a block before its pass, with the cache that has all but the last features."""
        shape = wanted.shape[0], self.block_width, self.layer.vocab_size
        cache = self.catch_up(params, state, inputs, wanted)
        return DraftedBlock(cache, jnp.zeros(shape, jnp.float32), jnp.int32(0))

    def propose(
        self, params: Params, state: FeatureState, inputs: RoundInputs
    ) -> tuple[Proposal, FeatureState]:
        """Reads a block, and draws one draft after another from what it says."""
        if self.shape is not None:
            return propose_grown(self, params, state, inputs)
        wanted = inputs.wanted()

        def first(block: DraftedBlock, token: RowTokens) -> tuple[Array, DraftedBlock]:
            return later(self.read_block(params, state, inputs, wanted, block.cache), token)

        def later(block: DraftedBlock, token: RowTokens) -> tuple[Array, DraftedBlock]:
            logits = jnp.take(block.logits, block.index, axis=1)
            logits = self.after(params, logits[:, None], token[:, None])[:, 0]
            return logits, block.replace(index=block.index + 1)

        proposal, block, _ = self.draw_chain(
            first, later, self.empty_block(params, state, inputs, wanted), inputs,
            wanted=wanted, ids=self.ids(params), is_sure=self.sure_of(params),
        )  # fmt: skip
        return proposal, state.replace(cache=block.cache)

    def grow(
        self, params: Params, inputs: RoundInputs, wanted: RowCounts, state: FeatureState
    ) -> tuple[Proposal, FeatureState]:
        """Reads a block, and makes a tree of it."""
        cache = self.empty_block(params, state, inputs, wanted).cache
        block = self.read_block(params, state, inputs, wanted, cache)

        def say(depth: int, tokens: Int32[Array, "b k"]) -> Float32[Array, "b k u"]:
            shape = *tokens.shape, block.logits.shape[-1]
            return self.after(params, jnp.broadcast_to(block.logits[:, depth, None], shape), tokens)

        def feed(memory: KVCache, level: Fed) -> tuple[Float32[Array, "b k u"], KVCache]:
            # Nothing is fed: the pass has said all levels.
            return say(level.depth, level.tokens), memory

        grown = make_tree(
            self, feed, block.cache, say(0, inputs.last_token[:, None])[:, 0], inputs,
            wanted=wanted, ids=self.ids(params),
        )  # fmt: skip
        return grown.proposal, state.replace(cache=grown.memory)

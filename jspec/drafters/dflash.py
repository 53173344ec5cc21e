"""A small decoder drafts a block in one pass (DFlash, arXiv 2602.06036; DSpark, 2607.05147).

    target   | t0  t1  t2 ... tn-1 | last |        features f0 ... fn-1 of its committed tokens
    cache    | of f0 ... fn-1      |               keys and values of every layer
    block                          | last mask mask mask |  sees the cache and all of itself
    drafts                               d1   d2   d3

One pass gives the logits of all drafts. Each draft is then drawn from its own distribution, which
is what the proposal reports, so every rule stays exact. In DFlash the distributions do not depend
on each other's drafts; with a Markov head, each is biased by the draft before. That is a product of
low rank a draft, in the loop that draws them.

With `draft_confidence`, a row stops where the next draft is unlikely to be kept: by the head's
estimate, if it has one, else by the distribution's largest probability. Both are looked at before
the draft is drawn. (To drop a draft for what was drawn would bias the output.)

With `tree_depth` the tree is grown without another pass, as in DDTree (2604.12989): a path's score
is the product of what the levels say of its tokens, which a Markov head biases by their parents.

The block's own keys and values are never committed: masks have no place in the context, and what
the target keeps of the drafts comes back as features.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Float32, Int32

from jspec.common.errors import InputError
from jspec.common.typing import Params, RowCounts, RowFlags, RowTokens
from jspec.drafters.dflash_head import (
    DflashConfig,
    block_logits,
    confidence_of,
    embed_block,
    fuse,
    load_dflash,
    markov_bias,
    markov_embedding,
    read_block,
    read_context,
)
from jspec.drafters.features import FeatureState, ReadingFeatures, num_missing, window
from jspec.drafters.spec import (
    BuiltDrafter,
    DrafterEntry,
    DrafterSpec,
    DraftingTrees,
    DrawnHeadOptions,
    Shape,
    TreeOptions,
    tree_shape,
    with_at_most_a_tree,
)
from jspec.drafters.trees import Fed, if_wanted, make_tree
from jspec.models.cache import KVCache
from jspec.models.config import DecoderConfig
from jspec.models.layers import linear, look_up
from jspec.speculation.acceptance.types import Proposal
from jspec.speculation.types import Kind, RoundInputs


class DraftedBlock(struct.PyTreeNode):
    """What one pass over a block has said of its drafts.

    Attributes:
      cache: the drafter's.
      logits: of each draft, among the tokens that the head can propose, [b w u].
      hidden: what the head reads, [b w d].
      index: of the draft that is next.
    """

    cache: KVCache
    logits: Float32[Array, "b w u"]
    hidden: Float32[Array, "b w d"]
    index: Int32[Array, ""]


@dataclasses.dataclass(frozen=True)
class DflashDrafter(ReadingFeatures):
    """Proposes a chain of which all distributions come from one pass.

    Attributes:
      config: the head's.
      target: the target's shape.
    """

    config: DflashConfig = dataclasses.field(kw_only=True)
    target: DecoderConfig = dataclasses.field(kw_only=True)
    kind = Kind("dflash", 0.6, 0.6, is_certain=True)

    def fuse(self, params: Params, hidden: Float[Array, "b t l d"]) -> Float32[Array, "b t d"]:
        """Returns one feature a token of the target's outputs."""
        return fuse(self.config, params, hidden)

    @property
    def block_width(self) -> int:
        """Drafts of the block that it reads."""
        return self.num_draft_tokens

    def propose(
        self, params: Params, state: FeatureState, inputs: RoundInputs
    ) -> tuple[Proposal, FeatureState]:
        """Reads a block of masks, and draws one draft after another from what it says."""
        wanted, config = inputs.wanted(), self.config

        def first(block: DraftedBlock, token: RowTokens) -> tuple[Array, DraftedBlock]:
            return later(self.read_block(params, state, inputs, wanted, block.cache), token)

        def later(block: DraftedBlock, token: RowTokens) -> tuple[Array, DraftedBlock]:
            logits = jnp.take(block.logits, block.index, axis=1)
            if config.markov_rank:
                logits += markov_bias(params, markov_embedding(params, token))
            return self.without_padding(params, logits), block.replace(index=block.index + 1)

        def is_sure(block: DraftedBlock, token: RowTokens) -> RowFlags:
            # The draft that is next was counted already.
            hidden = jnp.take(block.hidden, block.index - 1, axis=1)
            before = markov_embedding(params, token) if config.confidence_reads_markov else None
            return confidence_of(config, params, hidden, before) >= self.min_confidence

        has_estimate = config.has_confidence and self.min_confidence > 0
        proposal, block, _ = self.draw_chain(
            first, later, self.empty_block(params, state, inputs, wanted), inputs,
            wanted=wanted, ids=params["ids"] if config.is_cut else None,
            is_sure=is_sure if has_estimate else None,
        )  # fmt: skip
        return proposal, state.replace(cache=block.cache)

    def empty_block(
        self, params: Params, state: FeatureState, inputs: RoundInputs, wanted: RowCounts
    ) -> DraftedBlock:
        """Returns a block before its pass, with the cache that has all but the last features."""

        def read(cache: KVCache, width: int) -> KVCache:
            features = window(state.features, cache.length, width)
            return read_context(self.config, params, features, cache)

        shape = wanted.shape[0], self.block_width
        return DraftedBlock(
            self.read_lagging(state, wanted, read),
            jnp.zeros([*shape, self.layer.vocab_size], jnp.float32),
            jnp.zeros([*shape, self.layer.embed_dim], jnp.float32),
            jnp.int32(0),
        )

    def read_block(
        self,
        params: Params,
        state: FeatureState,
        inputs: RoundInputs,
        wanted: RowCounts,
        cache: KVCache,
    ) -> DraftedBlock:
        """Reads the features of the last round's tokens, and then the block of masks."""
        config, target = self.config, inputs.view.params
        features = window(state.features, cache.length, self.most_committed)
        cache = read_context(config, params, features, cache)
        cache = cache.commit(num_missing(state, wanted, cache))
        num_slots = config.num_slots(self.block_width)
        embedded = embed_block(config, params, target, inputs.last_token, num_slots)
        hidden, cache = read_block(config, params, embedded, cache)
        hidden = hidden[:, num_slots - self.block_width :]
        logits = block_logits(config, params, self.target, target, hidden)
        return DraftedBlock(cache, logits, hidden, jnp.int32(0))

    def without_padding(
        self, params: Params, logits: Float32[Array, "*b u"]
    ) -> Float32[Array, "*b u"]:
        """Returns logits in which ids that are not really used have no probability."""
        if self.vocab_size == self.target_vocab_size:
            return logits
        ids = params["ids"] if self.config.is_cut else jnp.arange(self.target_vocab_size)
        return jnp.where(ids < self.vocab_size, logits, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class DflashTreeDrafter(DraftingTrees, DflashDrafter):
    """Proposes a tree of what one pass finds likeliest, or of what is drawn from it.

    Attributes:
      shape: of the tree.
    """

    shape: Shape = dataclasses.field(kw_only=True)

    @property
    def most_committed(self) -> int:
        """The most tokens that a round commits: the last one, and a path."""
        return self.shape.depth + 1

    @property
    def block_width(self) -> int:
        """Drafts of the block: one a level."""
        return self.shape.depth

    def propose(
        self, params: Params, state: FeatureState, inputs: RoundInputs
    ) -> tuple[Proposal, FeatureState]:
        """Reads a block of masks, and grows a tree of it."""
        wanted = inputs.wanted()
        grow = functools.partial(self._grow, params, inputs, wanted)
        return if_wanted(grow, state, wanted)

    def _grow(
        self, params: Params, inputs: RoundInputs, wanted: RowCounts, state: FeatureState
    ) -> tuple[Proposal, FeatureState]:
        cache = self.empty_block(params, state, inputs, wanted).cache
        block = self.read_block(params, state, inputs, wanted, cache)

        def say(depth: int, tokens: Int32[Array, "b k"]) -> Float32[Array, "b k u"]:
            logits = jnp.broadcast_to(
                block.logits[:, depth, None], (*tokens.shape, block.logits.shape[-1])
            )
            if self.config.markov_rank:
                embedded = look_up(params["markov"]["embedding"], tokens)
                logits += linear(embedded, params["markov"]["kernel"])
            return self.without_padding(params, logits)

        def feed(memory: KVCache, level: Fed) -> tuple[Float32[Array, "b k u"], KVCache]:
            # Nothing is fed: the pass has said all levels.
            return say(level.depth, level.tokens), memory

        grown = make_tree(
            self, self.shape, feed, block.cache, say(0, inputs.last_token[:, None])[:, 0], inputs,
            wanted=wanted, ids=params["ids"] if self.config.is_cut else None,
        )  # fmt: skip
        return grown.proposal, state.replace(cache=grown.memory)


@dataclasses.dataclass(frozen=True)
class DflashOptions(DrawnHeadOptions, TreeOptions):
    """Of `dflash`."""


def make_dflash_drafter(spec: DrafterSpec, config: DflashConfig) -> DflashDrafter:
    """Returns the drafter over a head, of chains or of trees.

    Raises:
      InputError: a tree that is deeper than the head's blocks.
    """
    fields: dict[str, Any] = {"config": config, "target": spec.target_config, "dtype": spec.dtype}
    spec = with_at_most_a_tree(spec)
    shape = tree_shape(spec)
    if shape is None:
        fields |= spec.with_at_most(config.most_drafts).chain_fields
        return DflashDrafter(**fields)
    if shape.depth > config.most_drafts:
        raise InputError(
            f"expected tree_depth of at most {config.most_drafts}, the drafts of the head's "
            f"blocks; got {shape.depth}"
        )
    return DflashTreeDrafter(shape=shape, **fields, **spec.chain_fields)


def _build(spec: DrafterSpec) -> BuiltDrafter:
    head = load_dflash(spec.head_folder("dflash"), spec.target_config, spec.dtype)
    return BuiltDrafter(make_dflash_drafter(spec, head.config), head.params)


ENTRY = DrafterEntry(
    name="dflash",
    build=_build,
    proposes="a block, drawn in one pass by a trained decoder",
    source="2602.06036",
    options=DflashOptions,
    needs="draft_head",
)

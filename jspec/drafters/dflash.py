"""A small decoder drafts a block in one pass (DFlash, arXiv 2602.06036; DSpark, 2607.05147).

    target   | t0  t1  t2 ... tn-1 | last |        features f0 ... fn-1 of its committed tokens
    cache    | of f0 ... fn-1      |               keys and values of every layer
    block                          | last mask mask mask |  sees the cache and all of itself
    drafts                               d1   d2   d3

See `features` for how drafts are drawn, and trees grown. With a Markov head, each distribution is
biased by the draft before: a product of low rank a draft, in the loop that draws them.

With `draft_confidence`, a row stops where the next draft is unlikely to be kept: by the head's
estimate, if it has one, else by the distribution's largest probability. Either is looked at before
the draft is drawn. (To drop a draft for what was drawn would bias the output.)

The block's own keys and values are never committed: masks have no place in the context, and what
the target keeps of the drafts comes back as features.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jspec.common.typing import Params, RowCounts, RowFlags, RowTokens
from jspec.drafters.chain import SureFn
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
from jspec.drafters.features import BlockDrafter, DraftedBlock, FeatureState, num_missing, window
from jspec.drafters.spec import BuiltDrafter, DrafterSpec, growing_fields
from jspec.models.cache import KVCache
from jspec.models.config import DecoderConfig
from jspec.speculation.types import Kind, RoundInputs


@dataclasses.dataclass(frozen=True)
class DflashDrafter(BlockDrafter):
    """Proposes drafts of which all distributions come from one pass.

    Attributes:
      config: the head's.
      target: the target's shape.
    """

    config: DflashConfig = dataclasses.field(kw_only=True)
    target: DecoderConfig = dataclasses.field(kw_only=True)
    kind = Kind("dflash", 0.6, 0.6, is_certain=True)
    keeps_hidden = True

    def fuse(self, params: Params, hidden: Float[Array, "b t l d"]) -> Float32[Array, "b t d"]:
        """Returns one feature a token of the target's outputs."""
        return fuse(self.config, params, hidden)

    def ids(self, params: Params) -> Int32[Array, "u"] | None:
        """Returns the target's ids of the tokens that the head can propose; None for all."""
        return params["ids"] if self.config.is_cut else None

    def after(
        self, params: Params, logits: Float32[Array, "b k u"], tokens: Int32[Array, "b k"]
    ) -> Float32[Array, "b k u"]:
        """Returns a draft's logits, biased by the tokens before it; padding has no probability."""
        if self.config.markov_rank:
            logits += markov_bias(params, markov_embedding(params, tokens))
        return self.without_padding(params, logits)

    def sure_of(self, params: Params) -> SureFn | None:
        """Returns what says whether to go on, where the head has an estimate."""
        config = self.config
        if not config.has_confidence or self.min_confidence == 0:
            return None

        def is_sure(block: DraftedBlock, token: RowTokens) -> RowFlags:
            # The draft that is next was counted already.
            assert block.hidden is not None
            hidden = jnp.take(block.hidden, block.index - 1, axis=1)
            reads = config.confidence_reads_markov
            before = markov_embedding(params, token[:, None])[:, 0] if reads else None
            return confidence_of(config, params, hidden, before) >= self.min_confidence

        return is_sure

    def catch_up(
        self, params: Params, state: FeatureState, inputs: RoundInputs, wanted: RowCounts
    ) -> KVCache:
        """Reads features until no more are missing than a round commits."""

        def read(cache: KVCache, width: int) -> KVCache:
            features = window(state.features, cache.length, width)
            return read_context(self.config, params, features, cache)

        return self.read_lagging(state, wanted, read)

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
        return DraftedBlock(cache, logits, jnp.int32(0), hidden)


def make_dflash_drafter(spec: DrafterSpec, config: DflashConfig) -> DflashDrafter:
    """Returns the drafter over a head, of chains or of trees.

    Raises:
      InputError: a tree that is deeper than the head's blocks.
    """
    fields = growing_fields(spec, config.most_drafts)
    return DflashDrafter(**fields, config=config, target=spec.target_config, dtype=spec.dtype)


def build(spec: DrafterSpec) -> BuiltDrafter:
    """Returns the drafter over a trained head."""
    head = load_dflash(spec.head_folder("dflash"), spec.target_config, spec.dtype)
    return BuiltDrafter(make_dflash_drafter(spec, head.config), head.params)

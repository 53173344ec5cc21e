"""A trained head on the target's features proposes (EAGLE-3, arXiv 2503.01840): see `features`.

A head of P-EAGLE (arXiv 2602.01469) drafts all at once, from masks after the newest pair.

    block    | (f0 t1) ... (fn-1 last) | mask  mask  ...    the pairs that are missing, and masks
    drafts                        d1      d2    d3

The masks are never committed; see `features` for how drafts are drawn, and trees grown.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jspec.common.typing import Params, RowCounts, Tokens
from jspec.drafters.eagle_head import EagleConfig, apply_head, fuse, load_eagle, mask_feature
from jspec.drafters.features import (
    BlockDrafter,
    DraftedBlock,
    FeatureState,
    PairDrafter,
    num_missing,
    window,
)
from jspec.drafters.spec import BuiltDrafter, DrafterSpec, growing_fields
from jspec.models.cache import KVCache
from jspec.models.layers import look_up
from jspec.speculation.types import Kind, RoundInputs


@dataclasses.dataclass(frozen=True)
class EagleDrafter(PairDrafter):
    """Proposes what a head draws, or what it finds likeliest.

    Attributes:
      config: the head's.
    """

    config: EagleConfig = dataclasses.field(kw_only=True)
    kind = Kind("eagle", 0.6, 0.6, is_certain=True)

    def ids(self, params: Params) -> Int32[Array, "u"]:
        """Returns the target's ids of the tokens that the head can propose."""
        return params["ids"]

    def fuse(self, params: Params, hidden: Float[Array, "b t l d"]) -> Float32[Array, "b t d"]:
        """Returns one feature a token of the target's outputs."""
        return fuse(params, hidden, self.config.layer.norm_epsilon)

    def feed(
        self,
        params: Params,
        inputs: RoundInputs,
        tokens: Tokens,
        features: Float[Array, "b t d"],
        cache: KVCache,
        **options: Any,
    ) -> tuple[Float32[Array, "b l u"], Float32[Array, "b t d"], KVCache]:
        """Runs the head, see `apply_head`; ids that are not really used have no probability."""
        source = params if self.config.has_embedding else inputs.view.params
        embedded = look_up(source["embedding"], tokens)
        logits, hidden, cache = apply_head(
            self.config, params, embedded, features, cache, **options
        )
        return self.without_padding(params, logits), hidden, cache


@dataclasses.dataclass(frozen=True)
class ParallelEagleDrafter(BlockDrafter, EagleDrafter):
    """Proposes drafts of which all distributions come from one call of the head."""

    def read_block(
        self,
        params: Params,
        state: FeatureState,
        inputs: RoundInputs,
        wanted: RowCounts,
        cache: KVCache,
    ) -> DraftedBlock:
        """Reads the last round's pairs and, in the same call, the masks after them."""
        assert self.config.mask_id is not None
        num = num_missing(state, wanted, cache)
        width = self.most_committed + self.block_width - 1
        is_pair = jnp.arange(width) < num[:, None]
        text = state.history.append_one(inputs.last_token)
        tokens = jnp.where(is_pair, text.window(cache.length + 1, width), self.config.mask_id)
        features = window(state.features, cache.length, width).astype(jnp.float32)
        features = jnp.where(is_pair[..., None], features, mask_feature(self.config, params))
        # The newest pair predicts the first draft, and each mask a later draft.
        at = jnp.maximum(num - 1, 0)[:, None] + jnp.arange(self.block_width)
        logits, _, cache = self.feed(params, inputs, tokens, features, cache, logits_at=at)
        return DraftedBlock(cache.commit(num), logits, jnp.int32(0))


def make_eagle_drafter(spec: DrafterSpec, config: EagleConfig) -> EagleDrafter:
    """Returns the drafter over a head, of chains or of trees.

    Raises:
      InputError: a tree that is deeper than a P-EAGLE was trained for.
    """
    kind = EagleDrafter if config.mask_id is None else ParallelEagleDrafter
    return kind(**growing_fields(spec, config.most_drafts), config=config, dtype=spec.dtype)


def build(spec: DrafterSpec) -> BuiltDrafter:
    """Returns the drafter over a trained head."""
    head = load_eagle(spec.head_folder("eagle"), spec.target_config, spec.dtype)
    return BuiltDrafter(make_eagle_drafter(spec, head.config), head.params)

"""Drafters that read the target's hidden states of several layers, with their own cache.

    target     | t0  t1  t2 ... tn-1 | last |     features f0 ... fn-1 of its committed tokens
    cache      | of f0 ... fm-1 |                 lags; the rest is read when drafts are wanted

The features are remembered for every committed token, as they come with it. The cache is made of
them when the row is asked for drafts: in calls of many tokens for a prompt, or after a pause.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Float32, Int32

from jspec.common.typing import BlockFlags, Params, RowCounts, Tokens
from jspec.drafters.catch_up import CATCH_UP_WIDTH, empty_caches
from jspec.drafters.chain import ChainDrafter
from jspec.drafters.memory import History
from jspec.kernels import while_any
from jspec.models.cache import TAIL, KVCache, write_rows
from jspec.models.config import DecoderConfig
from jspec.models.layers import look_up
from jspec.speculation.types import RoundInputs


class FeatureState(struct.PyTreeNode):
    """The drafter's memory of the committed tokens."""

    history: History
    features: Float[Array, "b 1 s d"]  # the target's, fused, with room for a block after the last
    cache: KVCache  # the drafter's; its committed slots were made of real features


@dataclasses.dataclass(frozen=True)
class ReadingFeatures(ChainDrafter):
    """A drafter whose state is a `FeatureState`.

    Attributes:
      config: the head's, with `feature_layers`, the target's layers that are observed, and `layer`,
        the shape of the head's layers.
      dtype: of its cache and of the features that it remembers.
    """

    config: Any = dataclasses.field(kw_only=True)
    dtype: jax.typing.DTypeLike = dataclasses.field(kw_only=True)
    has_lag = True
    can_roll_back = True

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The target's layers whose outputs it observes."""
        return self.config.feature_layers

    @property
    def layer(self) -> DecoderConfig:
        """The shape of its layers."""
        return self.config.layer

    def fuse(self, params: Params, hidden: Float[Array, "b t l d"]) -> Float[Array, "b t d"]:
        """Returns one feature a token of the target's outputs."""
        raise NotImplementedError

    def ids(self, params: Params) -> Int32[Array, "u"] | None:
        """Returns the target's ids of the tokens that it can propose; None for the first ones."""
        return None

    def without_padding(
        self, params: Params, logits: Float32[Array, "*b u"]
    ) -> Float32[Array, "*b u"]:
        """Returns logits in which ids that are not really used have no probability."""
        if self.vocab_size == self.target_vocab_size:
            return logits
        ids = self.ids(params)
        ids = jnp.arange(logits.shape[-1]) if ids is None else ids
        return jnp.where(ids < self.vocab_size, logits, -jnp.inf)

    def catch_up(
        self, params: Params, state: FeatureState, inputs: RoundInputs, wanted: RowCounts
    ) -> KVCache:
        """Reads features until no more are missing than a round commits."""
        raise NotImplementedError

    @property
    def most_committed(self) -> int:
        """The most tokens that a round commits: the last, and all drafts or a path of them."""
        return (self.tree_depth or self.num_draft_tokens) + 1

    def lag(self, state: FeatureState, kind: RowCounts) -> RowCounts:
        """Returns the committed tokens to be read beyond those that a round reads anyway, [b]."""
        num_missed = state.history.length - state.cache.length
        return jnp.maximum(num_missed - self.most_committed, 0)

    def init(self, batch_size: int, capacity: int) -> FeatureState:
        """Returns the state of rows that have seen nothing."""
        # The layout of a cache with one head, so that `write_rows` can write it.
        shape = batch_size, 1, capacity + TAIL, self.layer.embed_dim
        return FeatureState(
            history=History.init(batch_size, capacity),
            features=jnp.zeros(shape, self.dtype),
            cache=empty_caches(self.layer, self.dtype)(batch_size, capacity),
        )

    def observe(
        self, params: Params, state: FeatureState, tokens: Tokens, hidden: Array, valid: BlockFlags
    ) -> FeatureState:
        """Remembers committed tokens and their features; they are read when drafts are wanted."""
        features = self.fuse(params, hidden)[:, :, None]
        return state.replace(
            history=state.history.append(tokens, valid),
            # Those of tokens that are not valid are written over by the next.
            features=write_rows(state.features, features, state.history.length),
        )

    def read_lagging(
        self, state: FeatureState, wanted: RowCounts, read: Callable[[KVCache, int], KVCache]
    ) -> KVCache:
        """Reads until no more are missing than a round commits at most.

        Args:
          state: the drafter's.
          wanted: drafts of each row, [b]; a row without any is left to lag.
          read: (cache, number) -> the cache with this number of slots written, and none committed.
        """

        def read_many(cache: KVCache) -> KVCache:
            # The last one is left to the call that drafts.
            num = jnp.clip(num_missing(state, wanted, cache) - 1, 0, CATCH_UP_WIDTH)
            return read(cache, CATCH_UP_WIDTH).commit(num)

        return while_any(
            lambda cache: num_missing(state, wanted, cache) > self.most_committed,
            read_many,
            state.cache,
        )


def num_missing(state: FeatureState, wanted: RowCounts, cache: KVCache) -> RowCounts:
    """Returns how many slots are to be made, the newest included, [b]."""
    return jnp.where(wanted > 0, state.history.length - cache.length, 0)


def window(features: Float[Array, "b 1 s d"], start: RowCounts, num: int) -> Array:
    """Returns the features from `start` on, [b num d]."""
    size = features.shape[2]
    # Rows that miss fewer read the last ones again, and do not commit them.
    slots = jnp.minimum(start[:, None] + jnp.arange(num), size - 1)
    rows = jnp.arange(slots.shape[0])[:, None]
    return look_up(features.reshape(-1, features.shape[-1]), rows * size + slots)

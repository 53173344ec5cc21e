"""Drafters that read the target's hidden states of several layers, with their own cache.

    target     | t0  t1  t2 ... tn-1 | last |     features f0 ... fn-1 of its committed tokens
    cache      | of f0 ... fm-1 |                 lags; the rest is read when drafts are wanted

The features are remembered for every committed token, as they come with it. The cache is made of
them when the row is asked for drafts: in calls of many tokens for a prompt, or after a pause.

A head that reads pairs of a feature and the token after it goes on with its own outputs.

    pairs      | (f0 t1)  (f1 t2) ... (fn-1 last) | (h d1)  (h d2) ...                  a chain
    pairs      | (f0 t1) ... (fn-1 last) | level 1: (h d) × k | level 2: (h d) × k ...  a tree

Its cache holds one pair a token. A pair whose feature was the head's own guess is made again from
the target's feature once the token is committed: a round begins with a call on all the pairs that
are missing, which is what the last round committed. The drafts of a tree's level (EAGLE-2, arXiv
2406.16858) are fed in one call, each with the head's output at its parent as feature, and under a
mask.

Of a block one pass gives the logits of all drafts. Each draft is drawn from its own distribution,
which is what the proposal reports, so every rule stays exact. A tree is grown without another pass,
as in DDTree (arXiv 2604.12989): a path's score is the product of what the levels say of its tokens.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from jspec.common.typing import BlockFlags, Params, RowCounts, RowTokens, Tokens
from jspec.drafters.chain import ChainDrafter, SureFn
from jspec.drafters.memory import CATCH_UP_WIDTH, History, empty_caches
from jspec.drafters.trees import Fed, make_tree, propose_grown
from jspec.kernels import while_any
from jspec.models.cache import TAIL, KVCache, write_rows
from jspec.models.config import DecoderConfig
from jspec.models.layers import look_up
from jspec.speculation.types import Proposal, RoundInputs


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

    @property
    def num_fed(self) -> int:
        """Drafts of a tree that are fed, of which there are more than are put forward."""
        return 0 if self.shape is None else self.shape.num_fed

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
        capacity += self.num_fed
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

        Rows for which no drafts are wanted, [b], are left to lag. `read` returns the cache with a
        number of slots written, and none committed.
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


class Drafting(struct.PyTreeNode):
    """The head in the middle of a chain."""

    cache: KVCache  # the head's
    hidden: Float32[Array, "b d"]  # stands for the newest token's feature


@dataclasses.dataclass(frozen=True)
class PairDrafter(ReadingFeatures):
    """Proposes what a head draws, or what it finds likeliest; a subclass says what the head is."""

    def read_features(
        self, inputs: RoundInputs, features: Float[Array, "b t d"]
    ) -> Float[Array, "b t d"]:
        """Returns remembered features as the head reads them."""
        return features

    def feed(
        self,
        params: Params,
        inputs: RoundInputs,
        tokens: Tokens,
        features: Float[Array, "b t d"],
        cache: KVCache,
        *,
        logits_at: Int[Array, "b"] | None = None,
        positions: Int[Array, "b t"] | None = None,
        block_mask: Bool[Array, "#b t s"] | None = None,
    ) -> tuple[Float32[Array, "b l u"], Float32[Array, "b t d"], KVCache]:
        """Runs the head on one block of pairs (feature of token i, token i + 1).

        Args:
          params: the drafter's.
          inputs: of the round.
          tokens: the later tokens.
          features: of the earlier ones, or the head's own outputs for them.
          cache: the head's; pair i has position and slot i.
          logits_at: compute logits at this one index of each row's block only.
          positions: of the pairs; None for a chain.
          block_mask: which pairs of the block each sees; see `ApplyFn`.

        Returns the logits of the tokens after the later ones, what takes the place of their
        features, and the cache, with the block written and nothing committed.
        """
        raise NotImplementedError

    def propose(
        self, params: Params, state: FeatureState, inputs: RoundInputs
    ) -> tuple[Proposal, FeatureState]:
        """Drafts one token after another, in a loop on the device."""
        if self.shape is not None:
            return propose_grown(self, params, state, inputs)
        wanted = inputs.wanted()

        def first(drafting: Drafting, token: RowTokens) -> tuple[Array, Drafting]:
            return self.first_call(params, state, inputs, wanted, drafting.cache)

        def later(drafting: Drafting, token: RowTokens) -> tuple[Array, Drafting]:
            at = jnp.zeros_like(token)
            pair = token[:, None], drafting.hidden[:, None]
            logits, hidden, cache = self.feed(params, inputs, *pair, drafting.cache, logits_at=at)
            cache = cache.commit(jnp.ones_like(token))
            return logits[:, 0], Drafting(cache, hidden[:, 0])

        cache = self.catch_up(params, state, inputs, wanted)
        nothing = jnp.zeros([wanted.shape[0], self.layer.embed_dim], jnp.float32)
        proposal, drafting, _ = self.draw_chain(
            first, later, Drafting(cache, nothing), inputs, wanted=wanted, ids=self.ids(params)
        )
        return proposal, self.forget_guesses(state, cache.length, drafting.cache, wanted)

    def grow(
        self, params: Params, inputs: RoundInputs, wanted: RowCounts, state: FeatureState
    ) -> tuple[Proposal, FeatureState]:
        """Grows a tree, level by level; the memory is a level's outputs, [b k d], and the cache."""
        before = self.catch_up(params, state, inputs, wanted)
        logits, root = self.first_call(params, state, inputs, wanted, before)

        def feed(
            memory: tuple[Array, KVCache], level: Fed
        ) -> tuple[Float32[Array, "b k u"], tuple[Array, KVCache]]:
            hidden, cache = memory
            features = jnp.take_along_axis(hidden, level.parents[..., None], axis=1)
            logits, hidden, cache = self.feed(
                params, inputs, level.tokens, features, cache,
                positions=level.positions(cache.length), block_mask=level.mask,
            )  # fmt: skip
            return logits, (hidden, cache)

        memory = root.hidden[:, None], root.cache
        grown = make_tree(self, feed, memory, logits, inputs, wanted=wanted, ids=self.ids(params))
        return grown.proposal, self.forget_guesses(state, before.length, grown.memory[1], wanted)

    def first_call(
        self,
        params: Params,
        state: FeatureState,
        inputs: RoundInputs,
        wanted: RowCounts,
        cache: KVCache,
    ) -> tuple[Float32[Array, "b u"], Drafting]:
        """Reads the last round's pairs; returns the first draft's logits."""
        num = num_missing(state, wanted, cache)
        at = jnp.maximum(num - 1, 0)
        width = self.most_committed
        logits, hidden, cache = self.feed_pairs(params, state, inputs, cache, width, at)
        hidden = jnp.take_along_axis(hidden, at[:, None, None], axis=1)[:, 0]
        return logits[:, 0], Drafting(cache.commit(num), hidden)

    def catch_up(
        self, params: Params, state: FeatureState, inputs: RoundInputs, wanted: RowCounts
    ) -> KVCache:
        """Reads pairs until no more are missing than the first call takes."""

        def read(cache: KVCache, width: int) -> KVCache:
            at = jnp.zeros_like(wanted)
            return self.feed_pairs(params, state, inputs, cache, width, at)[2]

        return self.read_lagging(state, wanted, read)

    def forget_guesses(
        self, state: FeatureState, length: RowCounts, cache: KVCache, wanted: RowCounts
    ) -> FeatureState:
        """Returns the state after a round's drafts; `length` is that before its first call."""
        # Pairs with guessed features are dropped: the target's own replace them once committed.
        length = jnp.where(wanted > 0, state.history.length, length)
        return state.replace(cache=cache.rollback(length))

    def feed_pairs(
        self,
        params: Params,
        state: FeatureState,
        inputs: RoundInputs,
        cache: KVCache,
        num: int,
        at: RowCounts,
    ) -> tuple[Float32[Array, "b 1 u"], Float32[Array, "b t d"], KVCache]:
        """Feeds the next pairs of the text: a pair joins a feature with the token after it."""
        # `last` is not committed yet, but it is half of the newest pair.
        text = state.history.append_one(inputs.last_token)
        features = self.read_features(inputs, window(state.features, cache.length, num))
        tokens = text.window(cache.length + 1, num)
        return self.feed(params, inputs, tokens, features, cache, logits_at=at)


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
    """Proposes a chain of which all distributions come from one pass, or a tree of them.

    With `keeps_hidden` a `DraftedBlock` has what the head reads.
    """

    keeps_hidden: ClassVar[bool] = False

    @property
    def block_width(self) -> int:
        """Drafts of the block that it reads: of a tree one a level."""
        return self.tree_depth or self.num_draft_tokens

    @property
    def num_fed(self) -> int:
        """None: the pass has said all levels of a tree."""
        return 0

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
        block = DraftedBlock(cache, jnp.zeros(shape, jnp.float32), jnp.int32(0))
        if not self.keeps_hidden:
            return block
        return block.replace(hidden=jnp.zeros([*shape[:2], self.layer.embed_dim], jnp.float32))

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

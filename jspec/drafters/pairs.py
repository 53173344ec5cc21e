"""Heads that read pairs of a feature of the target and the token after it, with their own outputs.

    target    | t0  t1  t2 ... tn-1 | last |     features f0 ... fn-1 of its committed tokens
    head      | (f0 t1)  (f1 t2) ... (fn-1 last) | (h d1)  (h d2) ...

The head's cache holds one pair a token. A pair whose feature was the head's own guess is made again
from the target's feature once the token is committed: a round begins with a call on all the pairs
that are missing, which is what the last round committed. A row without drafts wanted lags, and
later catches up in wider calls; so does the prompt.

With `tree_depth` the head drafts a tree (EAGLE-2, arXiv 2406.16858).

    pairs    | (f0 t1) ... (fn-1 last) | level 1: (h d) × k | level 2: (h d) × k | ...

The drafts of a level are fed in one call, each with the head's output at its parent as feature, and
under a mask. None of their pairs is kept: committed tokens bring the target's features along.
"""

import dataclasses

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Float32, Int

from jspec.common.typing import Params, RowCounts, RowTokens, Tokens
from jspec.drafters.features import FeatureState, ReadingFeatures, num_missing, window
from jspec.drafters.trees import Fed, make_tree, propose_grown
from jspec.models.cache import KVCache
from jspec.speculation.types import Proposal, RoundInputs


class Drafting(struct.PyTreeNode):
    """The head in the middle of a chain."""

    cache: KVCache  # the head's
    hidden: Float32[Array, "b d"]  # stands for the newest token's feature


@dataclasses.dataclass(frozen=True)
class PairDrafter(ReadingFeatures):
    """Proposes what a head draws, or what it finds likeliest; a subclass says what the head is."""

    def init(self, batch_size: int, capacity: int) -> FeatureState:
        """Returns the state of rows that have seen nothing."""
        # With room for a tree's drafts that are fed, of which there are more than are put forward.
        num_fed = 0 if self.shape is None else self.shape.num_fed
        return super().init(batch_size, capacity + num_fed)

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

        Returns:
          logits: of the tokens after the later ones; ids that are not really used have no
            probability.
          hidden: what takes the place of the later tokens' features.
          cache: with the block written and nothing committed.
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

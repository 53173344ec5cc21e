"""A second, cheaper Llama as drafter, with its own KV cache.

    target   | committed ................ c | last |
    draft    | cached ........... b |            (one or more tokens behind)
    propose           catch up  | c  last | d1  d2 ...

The drafter remembers every committed token, and how many of them its cache holds. Before proposing
it catches up to all but the newest committed token, in calls of many tokens, and then begins with a
fixed two-token call [newest committed, last]. That call fills the hole which a round with every
draft accepted leaves (its last draft was never fed to the drafter); in other rounds it rewrites one
slot with what it held. The prompt is caught up on in the same way, at the first round.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int32, Key

from jspec.drafters.history import History
from jspec.models import KVCache
from jspec.sampling import SamplingSettings, sample, sampling_probs
from jspec.speculation.noise import gumbel_noise
from jspec.speculation.types import Proposal, TargetView
from jspec.typing import ApplyFn, Params, RowTokens, Tokens

CATCH_UP_WIDTH = 64


class ModelState(struct.PyTreeNode):
    """The drafter's memory.

    Attributes:
      history: the committed tokens.
      cache: the draft model's; `cache.length` committed tokens are in it.
      fed: tokens behind `cache.length` that were fed while drafting, [b w]. As many of them as
        turn out to be committed stay in the cache.
    """

    history: History
    cache: KVCache
    fed: Int32[Array, "b w"]


@dataclasses.dataclass(frozen=True)
class ModelDrafter:
    """Proposes a chain sampled from a draft model.

    Attributes:
      apply: the draft model.
      init_cache: (batch size, capacity) -> its empty cache.
      num_draft_tokens: drafts a round.
      vocab_size: ids that draft and target share; the draft's padding beyond them is cut.
      target_vocab_size: width of the target's laws; the proposed laws are padded to it.
    """

    apply: ApplyFn
    init_cache: Callable[[int, int], KVCache]
    num_draft_tokens: int
    vocab_size: int
    target_vocab_size: int

    @property
    def may_be_silent(self) -> bool:
        """A model always has something to say."""
        return False

    def init(self, batch_size: int, capacity: int) -> ModelState:
        """Returns the state of rows that have seen nothing."""
        return ModelState(
            history=History.init(batch_size, capacity),
            cache=self.init_cache(batch_size, capacity),
            fed=jnp.full([batch_size, self.num_draft_tokens], -1, jnp.int32),
        )

    def observe(
        self,
        params: Params,
        state: ModelState,
        tokens: Tokens,
        hidden: Array,
        valid: Bool[Array, "b t"],
    ) -> ModelState:
        """Remembers committed tokens; those that were fed while drafting count as cached."""
        del params, hidden
        width = min(tokens.shape[1], self.num_draft_tokens)
        is_fed = (state.fed[:, :width] == tokens[:, :width]) & valid[:, :width]
        is_fed &= (state.cache.length == state.history.length)[:, None]
        num_fed = jnp.sum(jnp.cumprod(is_fed, axis=1, dtype=jnp.int32), axis=1)
        return ModelState(
            history=state.history.append(tokens, valid),
            cache=state.cache.commit(num_fed),
            fed=jnp.full_like(state.fed, -1),
        )

    def propose(
        self,
        params: Params,
        state: ModelState,
        last_token: RowTokens,
        *,
        rng_keys: Key[Array, "b w"],
        settings: SamplingSettings,
        view: TargetView,
    ) -> tuple[Proposal, ModelState]:
        """Drafts one token after another in a `lax.scan`."""
        del view
        history = state.history
        cache = self._catch_up(params, state)
        # The two-token call rewrites the newest committed slot: an up-to-date row steps back.
        cache = cache.rollback(jnp.maximum(history.length - 1, 0))
        block = jnp.stack([history.newest(), last_token], axis=1)
        logits, _, cache = self.apply(params, block, cache)
        cache = cache.commit(jnp.full_like(last_token, 2))
        first = self._draw(logits[:, 1:], settings, rng_keys[:, 0])

        def draft_next(
            carry: tuple[KVCache, Array, SamplingSettings], keys: Key[Array, "b"]
        ) -> tuple[Any, Any]:
            cache, token, settings = carry
            settings = settings.after(token)
            logits, _, cache = self.apply(params, token[:, None], cache)
            token, probs = self._draw(logits, settings, keys)
            return (cache.commit(jnp.ones_like(token)), token, settings), (token, probs)

        start = (cache, first[0], settings)
        (cache, *_), rest = jax.lax.scan(draft_next, start, rng_keys[:, 1:].T)
        tokens, probs = (
            jnp.concatenate([one[:, None], jnp.moveaxis(more, 0, 1)], axis=1)
            for one, more in zip(first, rest, strict=True)
        )
        fed = jnp.concatenate([last_token[:, None], tokens[:, :-1]], axis=1)
        num_tokens = jnp.full_like(last_token, self.num_draft_tokens)
        state = ModelState(history, cache.rollback(history.length), fed)
        return Proposal(tokens, num_tokens, probs), state

    def _draw(
        self, logits: Array, settings: SamplingSettings, keys: Key[Array, "b"]
    ) -> tuple[RowTokens, Array]:
        """Returns the drawn token [b] and the law it was drawn from, [b v] of the target's v."""
        padding = ((0, 0), (0, 0), (0, self.target_vocab_size - self.vocab_size))
        logits = jnp.pad(logits[..., : self.vocab_size], padding, constant_values=-jnp.inf)
        probs = sampling_probs(logits, settings)[:, 0]
        noise = gumbel_noise(keys, self.target_vocab_size, settings.is_random)
        return sample(probs, noise), probs

    def _catch_up(self, params: Params, state: ModelState) -> KVCache:
        """Feeds committed tokens until only the newest may be missing. Usually nothing to do.

        A while loop of no trips leaves the cache where it is; a `lax.cond` would copy it.
        """
        history = state.history

        def missing(cache: KVCache) -> Array:
            return jnp.maximum(history.length - 1 - cache.length, 0)

        def feed(cache: KVCache) -> KVCache:
            tokens = history.window(cache.length, CATCH_UP_WIDTH)
            _, _, fed = self.apply(params, tokens, cache)
            return fed.commit(jnp.minimum(missing(cache), CATCH_UP_WIDTH))

        return jax.lax.while_loop(lambda cache: (missing(cache) > 0).any(), feed, state.cache)

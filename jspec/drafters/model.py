"""A second, cheaper Llama as drafter, with its own KV cache.

    target   | committed ................ c | last |
    draft    | cached ........... b |            (lags by one or more tokens)
    propose           catch up  | c  last | d1  d2 ...

The drafter remembers every committed token and how many of them its cache holds. Before proposing
it reads those that are missing, the prompt among them, but for the newest committed token: the
round begins with a two-token call [newest committed, last]. A row without drafts wanted lags on.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int32, Key

from jspec.common.errors import InputError
from jspec.common.typing import ApplyFn, Params, RowCounts, RowFlags, RowTokens, Tokens
from jspec.drafters.chain import draw_chain
from jspec.drafters.draw import DrawFn, draw_from_distribution
from jspec.drafters.memory import History, StopsUnsure
from jspec.drafters.spec import BuiltDrafter, ConfidenceOptions, DrafterEntry, DrafterSpec
from jspec.models import KVCache, init_cache, make_apply
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.acceptance.types import Proposal
from jspec.speculation.types import Kind, LimitFn, TargetView

CATCH_UP_WIDTH = 64
_FEW = 8  # width of the calls that read the last tokens, twice as many at most
_KINDS = (Kind("model", 0.7, 0.7),)  # acceptance before it is known


class ModelState(struct.PyTreeNode):
    """The drafter's memory.

    Attributes:
      history: the committed tokens.
      cache: the draft model's; `cache.length` committed tokens are in it.
      fed: tokens after `cache.length` that were fed while drafting, [b w]; those that turn out to
        be committed stay in the cache.
    """

    history: History
    cache: KVCache
    fed: Int32[Array, "b w"]


@dataclasses.dataclass(frozen=True)
class ModelDrafter(StopsUnsure):
    """Proposes a chain sampled from a draft model.

    Attributes:
      apply: the draft model.
      init_cache: (batch size, capacity) -> its empty cache.
      num_draft_tokens: drafts a round.
      vocab_size: ids that draft and target share; the draft's padding beyond them is cut.
      target_vocab_size: width of the target's distributions, to which the proposed are padded.
      min_confidence, draw: see `draw_chain`.
    """

    apply: ApplyFn
    init_cache: Callable[[int, int], KVCache]
    num_draft_tokens: int
    vocab_size: int
    target_vocab_size: int
    min_confidence: float = 0.0
    draw: DrawFn = draw_from_distribution

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """One: drafts of a model are all alike."""
        return _KINDS

    def lag(self, state: ModelState, kind: RowCounts) -> RowCounts:
        """Returns the tokens in the calls that read what is missing, padding included, [b]."""
        del kind
        # The same widths in the same order as `_catch_up`.
        missing = jnp.maximum(state.history.length - 1 - state.cache.length, 0)
        num_wide = -(-jnp.maximum(missing - 2 * _FEW, 0) // CATCH_UP_WIDTH)
        wide = num_wide * CATCH_UP_WIDTH
        return wide + -(-jnp.maximum(missing - wide, 0) // _FEW) * _FEW

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
        # A draft stays cached if it and all before it were committed, and no slot is missing.
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
        limit: LimitFn,
        rng_keys: Key[Array, "b w"],
        settings: SamplingSettings,
        view: TargetView,
    ) -> tuple[Proposal, ModelState]:
        """Drafts one token after another, in a loop on the device."""
        del view
        wanted = limit(jnp.zeros_like(last_token))  # the drafter has one kind, number 0
        history, is_wanted = state.history, wanted > 0

        def first(cache: KVCache, token: RowTokens) -> tuple[Array, KVCache]:
            # If every draft of a round is accepted, the last was never fed to the drafter: this
            # call fills that hole. Else it rewrites one slot with what it held.
            block = jnp.stack([history.newest(), token], axis=1)
            logits, _, cache = self.apply(params, block, cache, logits_at=jnp.ones_like(token))
            return logits[:, 0, : self.vocab_size], cache.commit(jnp.full_like(token, 2))

        def later(cache: KVCache, token: RowTokens) -> tuple[Array, KVCache]:
            logits, _, cache = self.apply(params, token[:, None], cache)
            return logits[:, 0, : self.vocab_size], cache.commit(jnp.ones_like(token))

        proposal, cache, _ = draw_chain(
            first,
            later,
            self.ready_cache(params, state, is_wanted),
            last_token,
            limit=wanted,
            rng_keys=rng_keys,
            settings=settings,
            vocab_size=self.target_vocab_size,
            min_confidence=self.min_confidence,
            draw=self.draw,
        )
        # The last draft is not fed, as no draft follows it.
        fed = jnp.concatenate([last_token[:, None], proposal.tokens[:, :-1]], axis=1)
        return proposal, self.remember(state, cache, fed, proposal.num_tokens, is_wanted)

    def ready_cache(self, params: Params, state: ModelState, is_wanted: RowFlags) -> KVCache:
        """Catches up; returns the cache without the newest committed token."""
        cache = self._catch_up(params, state, is_wanted)
        # The first call begins with that token and rewrites its slot: an up-to-date row steps back.
        before_newest = jnp.maximum(state.history.length - 1, 0)
        return cache.rollback(jnp.where(is_wanted, before_newest, cache.length))

    def remember(
        self,
        state: ModelState,
        cache: KVCache,
        fed: Int32[Array, "b w"],
        num_tokens: RowCounts,
        is_wanted: RowFlags,
    ) -> ModelState:
        """Returns the state after a round's drafts.

        Args:
          state: before it.
          cache: with what was fed in it, whatever its length.
          fed: the tokens after the committed ones of the rows that drafted.
          num_tokens: drafts of each row, [b].
          is_wanted: the rows that drafted, [b].
        """
        length = jnp.where(is_wanted, state.history.length, state.cache.length)
        # A neighbour that wants more makes the batch feed more; what a row has yet to read must not
        # depend on its neighbours. So as many fed tokens count as the row has drafts.
        is_own = jnp.arange(fed.shape[1]) < num_tokens[:, None]
        # No token is -1, so that nothing else counts as fed.
        fed = jnp.where(is_own & is_wanted[:, None], fed, -1)
        return ModelState(state.history, cache.rollback(length), fed)

    def _catch_up(self, params: Params, state: ModelState, is_wanted: RowFlags) -> KVCache:
        """Feeds committed tokens until only the newest may be missing. Usually nothing to do."""
        history = state.history

        def missing(cache: KVCache) -> RowCounts:
            return jnp.where(is_wanted, jnp.maximum(history.length - 1 - cache.length, 0), 0)

        def feed(width: int, cache: KVCache) -> KVCache:
            tokens = history.window(cache.length, width)
            _, _, fed = self.apply(params, tokens, cache, logits_at=jnp.zeros_like(history.length))
            return fed.commit(jnp.minimum(missing(cache), width))

        cache = state.cache
        # A while loop of no trips leaves the cache where it is; a `lax.cond` would copy it.
        for width, most_left in ((CATCH_UP_WIDTH, 2 * _FEW), (_FEW, 0)):
            cache = jax.lax.while_loop(
                lambda cache, most_left=most_left: (missing(cache) > most_left).any(),
                functools.partial(feed, width),
                cache,
            )
        return cache


def make_model_drafter(spec: DrafterSpec, name: str = "model") -> ModelDrafter:
    """Returns the drafter over the draft model, for the drafter called `name`.

    Raises:
      InputError: there is no draft model.
    """
    config = spec.draft_config
    if config is None:
        raise InputError(f"the drafter {name!r} expects a draft model, and none was given")

    def empty_cache(batch_size: int, capacity: int) -> KVCache:
        return init_cache(config, batch_size=batch_size, capacity=capacity, dtype=spec.dtype)

    return ModelDrafter(
        apply=make_apply(config),
        init_cache=empty_cache,
        num_draft_tokens=spec.num_draft_tokens,
        vocab_size=spec.vocab_size,
        target_vocab_size=spec.target_config.vocab_size,
        min_confidence=spec.options.draft_confidence,
    )


def build_model(spec: DrafterSpec) -> BuiltDrafter:
    """Returns the drafter over the draft model, with the draft model's parameters."""
    return BuiltDrafter(make_model_drafter(spec), spec.draft_params)


ENTRY = DrafterEntry(
    name="model",
    build=build_model,
    proposes="what a second, cheaper model draws (default with `--draft`)",
    source="2211.17192, 2302.01318",
    options=ConfidenceOptions,
    needs="draft",
    prior_cost=2.22,  # the target itself in int4
)

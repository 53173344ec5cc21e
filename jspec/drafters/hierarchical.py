"""A draft model that is itself decoded speculatively (arXiv 2211.17192, section 6).

    text     | ... previous  token |
    guesses  |                     | g1  g2  g3         the inner drafter's
    one call | previous  token  g1  g2  g3              of the draft model
    draws    |            x0   x1  x2  x3               from its probs, with the round's own noise
    kept     | ... previous  token  x0  x1  x2          if g1 = x0, g2 = x1, g3 is not x2

The draft model's token at each offset of a round is the one that the distribution there and the
offset's own noise give: a guess is kept exactly if it is that token (the coupled rule, arXiv
2408.07978). So the drafts and their distributions are those of the drafter `model` with the same
keys, as far as a pass over several tokens rounds like one over a single token, and no randomness is
added. Only the number of calls changes: one gives as many drafts as guesses were right, and one
more.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32, Key

from jspec.common.errors import InputError
from jspec.common.typing import (
    DraftProbs,
    DraftTokens,
    Params,
    RowCounts,
    RowFlags,
    RowTokens,
    Tokens,
)
from jspec.drafters.model import ModelDrafter, ModelState, make_model_drafter
from jspec.drafters.spec import (
    BuiltDrafter,
    ConfidenceOptions,
    DrafterEntry,
    DrafterSpec,
    option,
)
from jspec.models import KVCache
from jspec.sampling.distribution import (
    SamplingSettings,
    confidence,
    likeliest,
    process_drafts,
    sample,
    sampling_probs,
)
from jspec.sampling.noise import gumbel_noise
from jspec.speculation.acceptance.types import Proposal
from jspec.speculation.types import Drafter, Kind, LimitFn, TargetView

_ASSUMED = 0.7, 0.7  # acceptance of a draft model, before it is known


@dataclasses.dataclass(frozen=True)
class HierarchicalOptions(ConfidenceOptions):
    """Of `hierarchical`."""

    inner_drafter: str = option(
        "prompt_lookup", "What guesses the draft model's tokens for hierarchical."
    )
    inner_num_draft_tokens: int = option(
        4, "How many of them it guesses at a time, at most.", between=(1, 64)
    )


class HierarchicalParams(NamedTuple):
    """Parameters of the draft model and of the inner drafter."""

    draft: Params
    inner: Params = None


class HierarchicalState(NamedTuple):
    """Memory of the draft model and of the inner drafter: both have seen what is committed."""

    model: ModelState
    inner: Any

    @property
    def cache(self) -> KVCache:
        """The draft model's."""
        return self.model.cache


class _Drafting(struct.PyTreeNode):
    """A chain in the making.

    Attributes:
      cache: the draft model's, up to the token before the newest.
      inner: the inner drafter's state, which has seen all but the newest token.
      settings: behind the newest token.
      newest: the last two tokens, [b 2].
      tokens: drawn so far, [b w].
      probs: their distributions, [b w v].
      num_tokens: of each row's, [b].
      fed: what stands in the cache behind the committed tokens, [b w].
      is_going: rows that want more, [b].
    """

    cache: KVCache
    inner: Any
    settings: SamplingSettings
    newest: Int32[Array, "b 2"]
    tokens: DraftTokens
    probs: DraftProbs
    num_tokens: RowCounts
    fed: Int32[Array, "b w"]
    is_going: RowFlags


class _Round(NamedTuple):
    """What a round asks for, the same for every call of the draft model.

    Attributes:
      params: of both.
      wanted: drafts of each row, [b].
      rng_keys: one for each draft.
      noise: drawn with them, [b w v].
    """

    params: HierarchicalParams
    wanted: RowCounts
    rng_keys: Key[Array, "b w"]
    noise: Float32[Array, "b w v"]


@dataclasses.dataclass(frozen=True)
class HierarchicalDrafter:
    """Proposes the drafts of a draft model, in fewer calls of it.

    Attributes:
      model: the drafter whose drafts these are.
      inner: guesses them; how well changes the number of calls, never a draft.
    """

    model: ModelDrafter
    inner: Drafter

    @property
    def num_draft_tokens(self) -> int:
        """The draft model's."""
        return self.model.num_draft_tokens

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """One: drafts of a model are all alike."""
        return (Kind("hierarchical", *_ASSUMED),)

    @property
    def may_be_silent(self) -> bool:
        """As the draft model: whether there was a guess makes no difference."""
        return self.model.may_be_silent

    def lag(self, state: HierarchicalState, kind: RowCounts) -> RowCounts:
        """Returns the places of the calls by which the draft model catches up, [b]."""
        return self.model.lag(state.model, kind)

    def init(self, batch_size: int, capacity: int) -> HierarchicalState:
        """Returns the state of rows that have seen nothing."""
        return HierarchicalState(
            self.model.init(batch_size, capacity), self.inner.init(batch_size, capacity)
        )

    def observe(
        self,
        params: HierarchicalParams,
        state: HierarchicalState,
        tokens: Tokens,
        hidden: Array,
        valid: Bool[Array, "b t"],
    ) -> HierarchicalState:
        """Shows both the committed tokens."""
        return HierarchicalState(
            self.model.observe(params.draft, state.model, tokens, hidden, valid),
            self.inner.observe(params.inner, state.inner, tokens, hidden, valid),
        )

    def propose(
        self,
        params: HierarchicalParams,
        state: HierarchicalState,
        last_token: RowTokens,
        *,
        limit: LimitFn,
        rng_keys: Key[Array, "b w"],
        settings: SamplingSettings,
        view: TargetView,
    ) -> tuple[Proposal, HierarchicalState]:
        """Drafts as many tokens as guesses allow in each call of the draft model."""
        del view
        wanted = limit(jnp.zeros_like(last_token))
        (batch_size, width), vocab_size = rng_keys.shape, self.model.target_vocab_size
        is_wanted = wanted > 0
        is_random = settings.is_random & is_wanted.any()
        noise = gumbel_noise(rng_keys.reshape(-1), vocab_size, is_random)
        a_round = _Round(params, wanted, rng_keys, noise.reshape(batch_size, width, vocab_size))
        drafting = _Drafting(
            cache=self.model.ready_cache(params.draft, state.model, is_wanted),
            inner=state.inner,
            settings=settings,
            newest=jnp.stack([state.model.history.newest(), last_token], axis=1),
            tokens=jnp.zeros([batch_size, width], jnp.int32),
            probs=jnp.zeros([batch_size, width, vocab_size], jnp.float32),
            num_tokens=jnp.zeros_like(wanted),
            fed=jnp.full([batch_size, width], -1, jnp.int32),
            is_going=is_wanted,
        )
        drafting = jax.lax.while_loop(
            lambda now: now.is_going.any(), lambda now: self._grow(a_round, now), drafting
        )
        proposal = Proposal(drafting.tokens, drafting.num_tokens, drafting.probs)
        model = self.model.remember(
            state.model, drafting.cache, drafting.fed, drafting.num_tokens, is_wanted
        )
        return proposal, state._replace(model=model)  # what the inner one saw of drafts is dropped

    def _grow(self, a_round: _Round, now: _Drafting) -> _Drafting:
        """One call of the draft model: at least one draft more of each row that is sure of it."""
        params, width = a_round.params, now.tokens.shape[1]
        guess, inner = self._guess(a_round, now)
        block = jnp.concatenate([now.newest, guess.tokens], axis=1)
        logits, hidden, cache = self.model.apply(params.draft, block, now.cache)
        block, hidden = block[:, 1:], hidden[:, 1:]  # the token before was only a rewrite
        logits = self._widen(logits[:, 1:])
        probs = _distributions(logits, now.settings, guess.tokens)
        rows = jnp.arange(block.shape[0])[:, None]
        offsets = now.num_tokens[:, None] + jnp.arange(block.shape[1])
        tokens = sample(probs, a_round.noise[rows, jnp.minimum(offsets, width - 1)])
        is_reached = now.is_going[:, None] & _follows(guess, tokens)
        is_reached &= offsets < a_round.wanted[:, None]
        is_sure = self._is_sure(logits, probs, now.settings) & (tokens >= 0)
        is_meant = is_reached & _leading(is_sure)
        num_new = jnp.sum(is_meant, axis=1, dtype=jnp.int32)
        num_tokens = now.num_tokens + num_new
        is_stopped = (is_reached & ~is_sure).any(axis=1) | (num_tokens >= a_round.wanted)
        slots = jnp.where(is_meant, offsets, width)  # past the end: dropped
        chain = jnp.concatenate([now.newest, tokens], axis=1)
        return _Drafting(
            cache=cache.commit(num_new),
            inner=self.inner.observe(params.inner, inner, block, hidden, is_meant),
            settings=now.settings.after_all(tokens, is_meant),
            newest=jnp.take_along_axis(chain, num_new[:, None] + jnp.arange(2), axis=1),
            tokens=now.tokens.at[rows, slots].set(tokens, mode="drop"),
            probs=now.probs.at[rows, slots].set(probs, mode="drop"),
            num_tokens=num_tokens,
            fed=now.fed.at[rows, offsets].set(block, mode="drop"),
            is_going=now.is_going & ~is_stopped,
        )

    def _guess(self, a_round: _Round, now: _Drafting) -> tuple[Proposal, Any]:
        """Asks the inner drafter for all drafts that a row wants but the last, which is free."""
        params, num_guesses = a_round.params, self.inner.num_draft_tokens
        room = jnp.where(now.is_going, a_round.wanted - now.num_tokens - 1, 0)
        room = jnp.clip(room, 0, num_guesses)
        offsets = now.num_tokens[:, None] + jnp.arange(num_guesses)
        offsets = jnp.minimum(offsets, now.tokens.shape[1] - 1)
        before = now.cache.commit(jnp.ones_like(room))  # all but the newest token
        return self.inner.propose(
            params.inner,
            now.inner,
            now.newest[:, 1],
            limit=lambda kind: jnp.broadcast_to(room, kind.shape),
            rng_keys=jnp.take_along_axis(a_round.rng_keys, offsets, axis=1),
            settings=now.settings,
            view=TargetView(params.draft, self.model.apply, before),
        )

    def _widen(self, logits: Float32[Array, "b t u"]) -> Float32[Array, "b t v"]:
        """Returns logits as many as a target's; tokens that the draft lacks have -inf."""
        missing = self.model.target_vocab_size - self.model.vocab_size
        logits = logits[..., : self.model.vocab_size]
        return jnp.pad(logits, ((0, 0), (0, 0), (0, missing)), constant_values=-jnp.inf)

    def _is_sure(
        self,
        logits: Float32[Array, "b t v"],
        probs: Float32[Array, "b t v"],
        settings: SamplingSettings,
    ) -> Bool[Array, "b t"]:
        """Marks distributions whose most likely token is likely enough."""
        if self.model.min_confidence == 0:
            return jnp.ones(probs.shape[:2], bool)
        return confidence(likeliest(logits), probs, settings) >= self.model.min_confidence


def _distributions(
    logits: Float32[Array, "b t v"], settings: SamplingSettings, guesses: DraftTokens
) -> Float32[Array, "b t v"]:
    """Returns the distributions behind the newest token and behind each guess."""
    logits = process_drafts(logits, settings, guesses)
    return sampling_probs(logits, settings.without_processors())


def _follows(guess: Proposal, tokens: Int32[Array, "b t"]) -> Bool[Array, "b t"]:
    """Marks the draws whose distribution is that of the chain: every guess before them was
    right.
    """
    is_right = guess.tokens == tokens[:, :-1]
    is_right &= jnp.arange(guess.width) < guess.num_tokens[:, None]
    return _leading(jnp.pad(is_right, ((0, 0), (1, 0)), constant_values=True))


def _leading(flags: Bool[Array, "b t"]) -> Bool[Array, "b t"]:
    """Marks those that are set with all before them."""
    return jnp.cumprod(flags, axis=1, dtype=jnp.int32) > 0


def build_hierarchical(spec: DrafterSpec) -> BuiltDrafter:
    """Returns the drafter over the draft model and what guesses its tokens.

    Raises:
      InputError: there is no draft model, or the inner drafter needs one of its own.
    """
    from jspec.drafters.registry import make_drafter  # which imports this file

    model = make_model_drafter(spec, "hierarchical")
    # The last draft of a round comes with the guesses before it.
    num_guesses = min(spec.options.inner_num_draft_tokens, max(spec.num_draft_tokens - 1, 1))
    inner_spec = spec._replace(num_draft_tokens=num_guesses, is_member=True)
    inner = make_drafter(_inner_name(spec.options), inner_spec)
    assert inner.drafter is not None
    params = HierarchicalParams(spec.draft_params, inner.params)
    return BuiltDrafter(HierarchicalDrafter(model, inner.drafter), params)


def _inner_name(options: HierarchicalOptions) -> str:
    from jspec.drafters.registry import REGISTRY

    name = options.inner_drafter
    known = [one.name for one in REGISTRY.values() if one.needs in ("", "draft_table")]
    known.remove("none")
    if not set(known).issuperset(name.split("+")):
        listed = ", ".join(known)
        raise InputError(f"expected an inner drafter without a model, among {listed}; got {name!r}")
    return name


def _options_read(options: HierarchicalOptions) -> set[str]:
    from jspec.drafters.registry import options_read

    own = {field.name for field in dataclasses.fields(HierarchicalOptions)}
    return own | options_read(_inner_name(options), options)  # type: ignore[arg-type]


ENTRY = DrafterEntry(
    name="hierarchical",
    build=build_hierarchical,
    proposes="the drafts of `model`, itself decoded speculatively by `--inner_drafter`",
    source="2211.17192",
    options=HierarchicalOptions,
    needs="draft",
    prior_cost=2.4,
    read=_options_read,
)

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
import functools
import operator
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.errors import InputError
from jspec.common.typing import (
    BlockFlags,
    DraftProbs,
    DraftTokens,
    Params,
    Probs,
    RowCounts,
    RowFlags,
    Tokens,
)
from jspec.drafters.chain import spread
from jspec.drafters.model import ModelDrafter, ModelState, make_model_drafter
from jspec.drafters.options import TREE, DrafterOptions
from jspec.drafters.registry import REGISTRY, make_drafter, options_read
from jspec.drafters.spec import BuiltDrafter, DrafterSpec
from jspec.kernels import while_any
from jspec.models import KVCache
from jspec.sampling.distribution import confidence, likeliest, sample, sampling_probs
from jspec.sampling.noise import gumbel_noise
from jspec.sampling.settings import SamplingSettings, process_drafts
from jspec.speculation.types import Drafter, Kind, Proposal, RoundInputs, SourceView, TargetView


class HierarchicalParams(NamedTuple):
    """Parameters of the draft model and of the inner drafter."""

    draft: Params
    inner: Params = None


class Drafting(struct.PyTreeNode):
    """A chain in the making."""

    cache: KVCache  # the draft model's, up to the token before the newest
    inner: Any  # the inner drafter's state, which has seen all but the newest token
    settings: SamplingSettings  # after the newest token
    newest: Int32[Array, "b 2"]  # the last two tokens
    tokens: DraftTokens  # drawn so far
    probs: DraftProbs
    num_tokens: RowCounts
    fed: Int32[Array, "b w"]  # the tokens in the cache after the committed ones
    is_going: RowFlags  # rows that want more


class Round(NamedTuple):
    """What is the same for every call of the draft model in a round."""

    model: ModelDrafter
    inner: Drafter  # guesses the model's tokens
    params: HierarchicalParams
    wanted: RowCounts  # drafts of each row
    inputs: RoundInputs
    noise: Float32[Array, "b w v"]  # drawn with the keys of the inputs


def grow(a_round: Round, drafting: Drafting) -> Drafting:
    """One call of the draft model: at least one draft more of each row that is sure of it."""
    model, params, width = a_round.model, a_round.params, drafting.tokens.shape[1]
    guess, inner = _guess(a_round, drafting)
    # The token before the newest fills the slot of a last draft that was never fed.
    block = jnp.concatenate([drafting.newest, guess.tokens], axis=1)
    logits, hidden, cache = model.apply(params.draft, block, drafting.cache)
    block, hidden = block[:, 1:], hidden[:, 1:]  # the token before was only a rewrite
    # The draft's own padding goes first, as its logits there mean nothing.
    logits = logits[:, 1:, : model.vocab_size]
    logits = spread(logits, model.ids(params.draft), model.target_vocab_size)
    processed = process_drafts(logits, drafting.settings, guess.tokens)
    # The processors ran one line above, with every guess seen; twice would penalise twice.
    probs = sampling_probs(processed, drafting.settings.without_processors())
    # [b 1] beside offsets of [b t]: together they index the round's [b w ...] arrays.
    rows = jnp.arange(block.shape[0])[:, None]
    offsets = drafting.num_tokens[:, None] + jnp.arange(block.shape[1])
    # The token that plain drafting would draw here: a guess is kept only if it is that token.
    tokens = sample(probs, a_round.noise[rows, jnp.minimum(offsets, width - 1)])
    is_reached = drafting.is_going[:, None] & _follows(guess, tokens)
    # The block has a static width, so it may reach past what a row wants.
    is_reached &= offsets < a_round.wanted[:, None]
    # Confidence is checked before the draw counts: to drop a drawn token would bias the output.
    is_sure = _is_sure(model, logits, probs, drafting.settings) & (tokens >= 0)
    is_meant = is_reached & _leading(is_sure)
    # The meant ones are a prefix, so their number also says where the chain ends.
    num_new = jnp.sum(is_meant, axis=1, dtype=jnp.int32)
    num_tokens = drafting.num_tokens + num_new
    # A row that is unsure once drafts no further in this round.
    is_stopped = (is_reached & ~is_sure).any(axis=1) | (num_tokens >= a_round.wanted)
    slots = jnp.where(is_meant, offsets, width)  # past the end: dropped
    chain = jnp.concatenate([drafting.newest, tokens], axis=1)
    return Drafting(
        # One slot a new draft: the last two tokens stay outside and begin the next block.
        cache=cache.commit(num_new),
        inner=a_round.inner.observe(params.inner, inner, block, hidden, is_meant),
        settings=drafting.settings.after_all(tokens, is_meant),
        # With no new draft this is the old pair; `chain` begins with those two tokens.
        newest=jnp.take_along_axis(chain, num_new[:, None] + jnp.arange(2), axis=1),
        tokens=drafting.tokens.at[rows, slots].set(tokens, mode="drop"),
        probs=drafting.probs.at[rows, slots].set(probs, mode="drop"),
        num_tokens=num_tokens,
        # Wrong guesses are written too; the next call writes over them from its own offset.
        fed=drafting.fed.at[rows, offsets].set(block, mode="drop"),
        is_going=drafting.is_going & ~is_stopped,
    )


def _guess(a_round: Round, drafting: Drafting) -> tuple[Proposal, Any]:
    """Asks the inner drafter for all drafts that a row wants but the last, which is free."""
    params, num_guesses = a_round.params, a_round.inner.num_draft_tokens
    # The call itself gives the last draft.
    room = jnp.where(drafting.is_going, a_round.wanted - drafting.num_tokens - 1, 0)
    room = jnp.clip(room, 0, num_guesses)
    offsets = drafting.num_tokens[:, None] + jnp.arange(num_guesses)
    offsets = jnp.minimum(offsets, drafting.tokens.shape[1] - 1)
    # The inner drafter's view counts the token before the newest as committed.
    before = drafting.cache.commit(jnp.ones_like(room))  # all but the newest token
    inputs = RoundInputs(
        drafting.newest[:, 1],
        # The inner drafter's kinds have no separate limits; only the room counts.
        limit=lambda kind: jnp.broadcast_to(room, kind.shape),
        rng_keys=jnp.take_along_axis(a_round.inputs.rng_keys, offsets, axis=1),
        settings=drafting.settings,
        # To the inner drafter the draft model is the target.
        view=TargetView(params.draft, a_round.model.apply, before),
        is_free=a_round.inputs.is_free,
    )
    return a_round.inner.propose(params.inner, drafting.inner, inputs)


def _is_sure(
    model: ModelDrafter, logits: Float32[Array, "b t v"], probs: Probs, settings: SamplingSettings
) -> BlockFlags:
    """Marks distributions whose most likely token is likely enough."""
    if model.min_confidence == 0:
        return jnp.ones(probs.shape[:2], bool)
    return confidence(likeliest(logits), probs, settings) >= model.min_confidence


def _follows(guess: Proposal, tokens: Tokens) -> BlockFlags:
    """Marks the draws of the chain's own distributions: every guess before them was right."""
    # The draw at an offset is compared with the guess that was fed after it.
    is_right = guess.tokens == tokens[:, :-1]
    is_right &= jnp.arange(guess.width) < guess.num_tokens[:, None]
    # The first draw has no guess before it and counts as right.
    return _leading(jnp.pad(is_right, ((0, 0), (1, 0)), constant_values=True))


def _leading(flags: Bool[Array, "b t"]) -> BlockFlags:
    # A product of 0s and 1s stays 0 after the first 0.
    return jnp.cumprod(flags, axis=1, dtype=jnp.int32) > 0


class PairState(NamedTuple):
    """Memory of the draft model and of the inner drafter: both have seen what is committed."""

    model: ModelState
    inner: Any


def _property_of(part: str) -> Any:
    return property(operator.attrgetter(part))


@dataclasses.dataclass(frozen=True)
class HierarchicalDrafter(Drafter):
    """Proposes the drafts of a draft model, in fewer calls of it.

    Attributes:
      model: the drafter whose drafts these are.
      inner: guesses them; how well changes the number of calls, never a draft.
    """

    model: ModelDrafter
    inner: Drafter
    has_lag = True

    num_draft_tokens = _property_of("model.num_draft_tokens")
    may_be_silent = _property_of("model.may_be_silent")  # whatever was guessed
    can_roll_back = _property_of("inner.can_roll_back")
    keeps_answers = _property_of("inner.keeps_answers")

    @property
    def has_slot_per_token(self) -> bool:
        """Whether the caches of both have."""
        return self.model.has_slot_per_token and self.inner.has_slot_per_token

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """One: the drafts are the draft model's."""
        (kind,) = self.model.kinds
        return (kind._replace(drafter="hierarchical"),)

    def lag(self, state: PairState, kind: RowCounts) -> RowCounts:
        """Returns the tokens in the calls by which the draft model catches up, [b]."""
        return self.model.lag(state.model, kind)

    def init(self, batch_size: int, capacity: int) -> PairState:
        """Returns the state of rows that have seen nothing."""
        return PairState(
            self.model.init(batch_size, capacity), self.inner.init(batch_size, capacity)
        )

    def observe(
        self, params: Params, state: PairState, tokens: Tokens, hidden: Array, valid: BlockFlags
    ) -> PairState:
        """Shows both the committed tokens."""
        return PairState(
            self.model.observe(params.draft, state.model, tokens, hidden, valid),
            self.inner.observe(params.inner, state.inner, tokens, hidden, valid),
        )

    def read_source(
        self, params: HierarchicalParams, state: PairState, source: SourceView
    ) -> PairState:
        """Shows the source to the draft model, and to the inner drafter, whose target that is."""
        model = self.model.read_source(params.draft, state.model, source)
        of_draft = source._replace(constants=model.cache.source)
        return PairState(model, self.inner.read_source(params.inner, state.inner, of_draft))

    def propose(
        self, params: HierarchicalParams, state: PairState, inputs: RoundInputs
    ) -> tuple[Proposal, PairState]:
        """Drafts as many tokens as guesses allow in each call of the draft model."""
        wanted, vocab_size = inputs.wanted(), self.model.target_vocab_size
        shape = inputs.rng_keys.shape
        is_wanted = wanted > 0
        # No row that drafts means no draw, so the costly noise can be left out.
        is_random = inputs.settings.is_random & is_wanted.any()
        # All noise of the round at once: it depends on the offset, not on which call draws there.
        noise = gumbel_noise(inputs.rng_keys.reshape(-1), vocab_size, is_random)
        noise = noise.reshape(*shape, vocab_size)
        drafting = Drafting(
            cache=self.model.ready_cache(params.draft, state.model, is_wanted),
            inner=state.inner,
            settings=inputs.settings,
            # Two tokens: the slot of the older one may never have been written.
            newest=jnp.stack([state.model.history.newest(), inputs.last_token], axis=1),
            tokens=jnp.zeros(shape, jnp.int32),
            # As wide as the target's distributions, which may have more ids than the draft model.
            probs=inputs.empty_probs(vocab_size),
            num_tokens=jnp.zeros_like(wanted),
            # No token is -1: a slot never fed cannot pass for a committed slot.
            fed=jnp.full(shape, -1, jnp.int32),
            is_going=is_wanted,
        )
        a_round = Round(self.model, self.inner, params, wanted, inputs, noise)
        drafting = while_any(
            lambda drafting: drafting.is_going, functools.partial(grow, a_round), drafting
        )
        proposal = Proposal(drafting.tokens, drafting.num_tokens, drafting.probs)
        model = self.model.remember(
            state.model, drafting.cache, drafting.fed, drafting.num_tokens, is_wanted
        )
        # The inner drafter forgets the drafts that it has seen: they may be rejected.
        return proposal, state._replace(model=model)


def build(spec: DrafterSpec) -> BuiltDrafter:
    """Returns the drafter over a draft model and an inner drafter."""
    model, draft_params = make_model_drafter(spec, "hierarchical")
    # The last draft of a round comes with the guesses before it.
    num_guesses = min(spec.options.inner_num_draft_tokens, max(spec.num_draft_tokens - 1, 1))
    # Guesses are read as a chain.
    inner_spec = spec._replace(
        num_draft_tokens=num_guesses, is_member=True, options=spec.options.without_tree()
    )
    inner = make_drafter(_inner_name(spec.options), inner_spec)
    assert inner.drafter is not None
    params = HierarchicalParams(draft_params, inner.params)
    return BuiltDrafter(HierarchicalDrafter(model, inner.drafter), params)


def _inner_name(options: DrafterOptions) -> str:
    name = options.inner_drafter
    known = [entry.name for entry in REGISTRY.values() if entry.needs in ("", "draft_table")]
    # Without guesses every call would give one draft: that is the drafter `model`.
    known.remove("none")
    if not set(known).issuperset(name.split("+")):
        listed = ", ".join(known)
        raise InputError(f"expected an inner drafter without a model, among {listed}; got {name!r}")
    return name


def options_of_inner(options: DrafterOptions) -> set[str]:
    """Returns the names of the options that its inner drafter reads."""
    return options_read(_inner_name(options), options) - TREE

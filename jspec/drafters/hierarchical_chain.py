"""The chain of a draft model that is itself decoded speculatively: one call of it after another."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32

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
from jspec.drafters.draw import spread
from jspec.drafters.model import ModelDrafter
from jspec.models import KVCache
from jspec.sampling.distribution import confidence, likeliest, sample, sampling_probs
from jspec.sampling.settings import SamplingSettings, process_drafts
from jspec.speculation.acceptance.types import Proposal
from jspec.speculation.types import Drafter, RoundInputs, TargetView


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


def grow(a_round: Round, now: Drafting) -> Drafting:
    """One call of the draft model: at least one draft more of each row that is sure of it."""
    model, params, width = a_round.model, a_round.params, now.tokens.shape[1]
    guess, inner = _guess(a_round, now)
    # The token before the newest fills the slot of a last draft that was never fed.
    block = jnp.concatenate([now.newest, guess.tokens], axis=1)
    logits, hidden, cache = model.apply(params.draft, block, now.cache)
    block, hidden = block[:, 1:], hidden[:, 1:]  # the token before was only a rewrite
    # The draft's own padding goes first, as its logits there mean nothing.
    logits = logits[:, 1:, : model.vocab_size]
    logits = spread(logits, model.ids(params.draft), model.target_vocab_size)
    processed = process_drafts(logits, now.settings, guess.tokens)
    # The processors ran one line above, with every guess seen; twice would penalise twice.
    probs = sampling_probs(processed, now.settings.without_processors())
    # [b 1] beside offsets of [b t]: together they index the round's [b w ...] arrays.
    rows = jnp.arange(block.shape[0])[:, None]
    offsets = now.num_tokens[:, None] + jnp.arange(block.shape[1])
    # The token that plain drafting would draw here: a guess is kept only if it is that token.
    tokens = sample(probs, a_round.noise[rows, jnp.minimum(offsets, width - 1)])
    is_reached = now.is_going[:, None] & _follows(guess, tokens)
    # The block has a static width, so it may reach past what a row wants.
    is_reached &= offsets < a_round.wanted[:, None]
    # Confidence is checked before the draw counts: to drop a drawn token would bias the output.
    is_sure = _is_sure(model, logits, probs, now.settings) & (tokens >= 0)
    is_meant = is_reached & _leading(is_sure)
    # The meant ones are a prefix, so their number also says where the chain ends.
    num_new = jnp.sum(is_meant, axis=1, dtype=jnp.int32)
    num_tokens = now.num_tokens + num_new
    # A row that is unsure once drafts no further in this round.
    is_stopped = (is_reached & ~is_sure).any(axis=1) | (num_tokens >= a_round.wanted)
    slots = jnp.where(is_meant, offsets, width)  # past the end: dropped
    chain = jnp.concatenate([now.newest, tokens], axis=1)
    return Drafting(
        # One slot a new draft: the last two tokens stay outside and begin the next block.
        cache=cache.commit(num_new),
        inner=a_round.inner.observe(params.inner, inner, block, hidden, is_meant),
        settings=now.settings.after_all(tokens, is_meant),
        # With no new draft this is the old pair; `chain` begins with those two tokens.
        newest=jnp.take_along_axis(chain, num_new[:, None] + jnp.arange(2), axis=1),
        tokens=now.tokens.at[rows, slots].set(tokens, mode="drop"),
        probs=now.probs.at[rows, slots].set(probs, mode="drop"),
        num_tokens=num_tokens,
        # Wrong guesses are written too; the next call writes over them from its own offset.
        fed=now.fed.at[rows, offsets].set(block, mode="drop"),
        is_going=now.is_going & ~is_stopped,
    )


def _guess(a_round: Round, now: Drafting) -> tuple[Proposal, Any]:
    """Asks the inner drafter for all drafts that a row wants but the last, which is free."""
    params, num_guesses = a_round.params, a_round.inner.num_draft_tokens
    # The call itself gives the last draft.
    room = jnp.where(now.is_going, a_round.wanted - now.num_tokens - 1, 0)
    room = jnp.clip(room, 0, num_guesses)
    offsets = now.num_tokens[:, None] + jnp.arange(num_guesses)
    offsets = jnp.minimum(offsets, now.tokens.shape[1] - 1)
    # The inner drafter's view counts the token before the newest as committed.
    before = now.cache.commit(jnp.ones_like(room))  # all but the newest token
    inputs = RoundInputs(
        now.newest[:, 1],
        # The inner drafter's kinds have no limits of their own: only the room counts.
        limit=lambda kind: jnp.broadcast_to(room, kind.shape),
        rng_keys=jnp.take_along_axis(a_round.inputs.rng_keys, offsets, axis=1),
        settings=now.settings,
        # To the inner drafter the draft model is the target.
        view=TargetView(params.draft, a_round.model.apply, before),
    )
    return a_round.inner.propose(params.inner, now.inner, inputs)


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
    # The first draw has no guess before it and is right without one.
    return _leading(jnp.pad(is_right, ((0, 0), (1, 0)), constant_values=True))


def _leading(flags: Bool[Array, "b t"]) -> BlockFlags:
    """Marks those that are set with all before them."""
    # A product of 0s and 1s stays 0 after the first 0.
    return jnp.cumprod(flags, axis=1, dtype=jnp.int32) > 0

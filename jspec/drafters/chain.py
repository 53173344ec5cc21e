"""Drawing drafts one after another, each from its own distribution.

A row stops where it has as many as are wanted of it, where there is no distribution (all logits
-inf: a table without an entry, or with only tokens that the processors forbid), or where its
distribution's most likely token is less likely than `min_confidence` (see `sampling.confidence`):
the distribution is looked at *before* it is drawn from. (To take back a token that was drawn
because it looks unlikely would bias the output.)

A batch of temperature 0 only draws the most likely tokens; of a distribution that is certain one
number is written. A draft's distribution is on record only where the draft is put forward: the rest
stays as it was, zeros if they are read (`RoundInputs.empty_probs`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float32, Int32, Key

from jspec.common.typing import DraftProbs, DraftTokens, RowCounts, RowFlags, RowTokens
from jspec.drafters.spec import DraftingTrees
from jspec.kernels import run_if, while_any
from jspec.sampling.distribution import best_token, confidence, likeliest, sample, sampling_probs
from jspec.sampling.noise import gumbel_noise
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.types import Kind, Proposal, RoundInputs

DrawFn = Callable[
    [Float32[Array, "b v"], SamplingSettings, Key[Array, "b"]],
    tuple[RowTokens, Float32[Array, "b v"]],
]


def draw_from_distribution(
    logits: Float32[Array, "b v"], settings: SamplingSettings, rng_keys: Key[Array, "b"]
) -> tuple[RowTokens, Float32[Array, "b v"]]:
    """Draws one token a row; returns it with its distribution. The keys are consumed."""
    # `sampling_probs` works on [b t v]; t is 1 here.
    probs = sampling_probs(logits[:, None], settings)[:, 0]
    noise = gumbel_noise(rng_keys, probs.shape[-1], settings.is_random)
    return sample(probs, noise), probs


class Drawing(NamedTuple):
    """How the drafts of a chain are drawn."""

    vocab_size: int  # width of the distributions
    ids: Int32[Array, "u"] | None  # of the tokens that the logits are of; None for the first ones
    min_confidence: float  # a draft is put forward where its distribution is at least this sure
    draw: DrawFn


class Drawn(NamedTuple):
    """One more draft of each row."""

    token: RowTokens
    is_meant: RowFlags  # rows that put it forward
    probs: DraftProbs  # the chain's


def draw_one(
    drawing: Drawing,
    logits: Float32[Array, "b u"],
    settings: SamplingSettings,
    rng_keys: Key[Array, "b w"],
    index: Int32[Array, ""],
    is_going: RowFlags,
    probs: DraftProbs,
) -> Drawn:
    """Draws draft `index` of the rows that are going; `probs` elsewhere is kept."""
    # Of as many numbers in either way: a row's choice does not depend on its neighbours.
    likely = likeliest(logits[:, None]) if drawing.min_confidence > 0 else None

    def is_meant(token: RowTokens, distribution: Float32[Array, "b v"]) -> RowFlags:
        meant = is_going & (token >= 0)  # NO_TOKEN comes from no distribution only
        if likely is not None:
            sureness = confidence(likely, distribution[:, None], settings)[:, 0]
            meant &= sureness >= drawing.min_confidence
        return meant

    def by_distribution(drawn: Drawn) -> Drawn:
        # `index` is traced, so that a Python slice is impossible.
        keys = jax.lax.dynamic_index_in_dim(rng_keys, index, axis=1, keepdims=False)
        token, distribution = drawing.draw(
            spread(logits, drawing.ids, drawing.vocab_size), settings, keys
        )
        meant = is_meant(token, distribution)
        # A draft that is not put forward leaves no distribution on record.
        distribution = jnp.where(meant[:, None], distribution, 0.0)
        return Drawn(token, meant, drawn.probs.at[:, index].set(distribution))

    def by_best() -> Drawn:
        # At temperature 0 nothing is drawn, and one number records the distribution.
        token = best_token(logits)
        if drawing.ids is not None:
            # From the head's own vocabulary to the target's ids.
            token = jnp.where(token >= 0, drawing.ids[token], token)
        # Without temperature `confidence` needs no probabilities, only the likeliest token's.
        meant = is_meant(token, jnp.ones_like(logits))
        place = jnp.arange(token.shape[0]), index, token
        # A stopped row writes 0: its record stays empty.
        certain = probs.at[place].set(meant.astype(jnp.float32))
        return Drawn(token, meant, certain)

    # Processors change the logits, so that the best raw token need not be the choice.
    if drawing.draw is draw_from_distribution and not settings.switches.processors:
        return run_if(settings.is_random, by_distribution, by_best())
    nothing = jnp.zeros_like(is_going, jnp.int32)
    return by_distribution(Drawn(nothing, is_going, probs))


def spread(
    logits: Float32[Array, "*b u"], ids: Int32[Array, "u"] | None, vocab_size: int
) -> Float32[Array, "*b v"]:
    """Returns logits of all tokens, -inf of those that there are none of.

    The logits are those of the tokens `ids`, or of the first ones.
    """
    if ids is not None:
        none = jnp.full([*logits.shape[:-1], vocab_size], -jnp.inf, jnp.float32)
        return none.at[..., ids].set(logits)
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, vocab_size - logits.shape[-1])]
    return jnp.pad(logits, padding, constant_values=-jnp.inf)


LogitsFn = Callable[[Any, RowTokens], tuple[Float32[Array, "b v"], Any]]
SureFn = Callable[[Any, RowTokens], RowFlags]


class _Chain(struct.PyTreeNode):
    memory: Any  # what the next distribution follows from, besides the token
    token: RowTokens  # the newest
    settings: SamplingSettings  # at its position
    count: Int32[Array, ""]  # calls made so far
    tokens: DraftTokens  # drawn so far
    probs: DraftProbs
    num_tokens: RowCounts  # those that are meant
    is_going: RowFlags  # rows that want more

    def lengthen(self, drawn: Drawn, wanted: RowCounts) -> Self:
        """Returns the chain with one more draft of the rows that put one forward."""
        num_tokens = self.num_tokens + drawn.is_meant.astype(jnp.int32)
        # NO_TOKEN is negative: a row that has stopped still needs an id that can be looked up.
        token = jnp.maximum(drawn.token, 0)
        return self.replace(
            token=token,
            # Penalties and the like see the drafts before the next draft.
            settings=self.settings.after(token),
            count=self.count + 1,
            tokens=self.tokens.at[:, self.count].set(token),
            probs=drawn.probs,
            num_tokens=num_tokens,
            # A row stops for good: drafts after a gap would have no meaning.
            is_going=drawn.is_meant & (num_tokens < wanted),
        )


@dataclasses.dataclass(frozen=True)
class ChainDrafter(DraftingTrees):
    """Base of the drafters that draw one draft after another.

    Attributes:
      num_draft_tokens: drafts a round.
      vocab_size: ids that are really used; the padding beyond them is cut.
      target_vocab_size: width of the target's distributions, and so of those that are reported.
      min_confidence: no draft follows where no token is this likely; 0 never stops it.
      draw: draws a token and returns the distribution it was drawn from; None is as usual.
      kind: of its proposals, with the acceptance assumed before it is known.
    """

    num_draft_tokens: int
    vocab_size: int
    target_vocab_size: int
    min_confidence: float = 0.0
    draw: DrawFn | None = None
    kind: ClassVar[Kind]

    @property
    def chain_kinds(self) -> tuple[Kind, ...]:
        """One: the drafts of a chain are all alike."""
        is_certain = self.kind.is_certain and not self.may_be_silent
        kind = self.kind._replace(most=self.num_draft_tokens, is_certain=is_certain)
        return (kind._replace(costs_when_silent=self.may_be_silent),)

    @property
    def may_be_silent(self) -> bool:
        """Whether being unsure may stop it."""
        return self.min_confidence > 0

    def draw_chain(
        self,
        first: LogitsFn,
        later: LogitsFn,
        memory: Any,
        inputs: RoundInputs,
        *,
        wanted: RowCounts | None = None,
        ids: Int32[Array, "u"] | None = None,
        draw: DrawFn = draw_from_distribution,
        is_sure: SureFn | None = None,
    ) -> tuple[Proposal, Any, Int32[Array, ""]]:
        """Draws a chain of drafts in loops that stop when no row wants more.

        Args:
          first: (memory, last token [b]) -> the logits of the first draft [b u], and the memory.
          later: likewise for every other draft.
          memory: a pytree, such as a cache.
          inputs: of the round.
          wanted: drafts of each row, [b], if they are known already.
          ids: of the tokens that the logits are of, rising; None for 0 to u-1.
          draw: for a drafter without a `draw` method.
          is_sure: (memory, the token before) -> the rows [b] that go on, asked before a draft is
            drawn; in the place of a look at its distribution's largest probability.

        Returns the proposal, the memory, and how many calls were made.
        """
        size = self.target_vocab_size
        least = self.min_confidence if is_sure is None else 0.0
        drawing = Drawing(size, ids, least, self.draw or draw)
        wanted = inputs.wanted() if wanted is None else wanted

        def grow(call: LogitsFn, chain: _Chain) -> _Chain:
            logits, memory = call(chain.memory, chain.token)
            # `count` is also the index of the draft about to be drawn.
            is_going = chain.is_going
            if is_sure is not None:
                is_going &= is_sure(memory, chain.token)
            state = chain.count, is_going, chain.probs
            drawn = draw_one(drawing, logits, chain.settings, inputs.rng_keys, *state)
            return chain.replace(memory=memory).lengthen(drawn, wanted)

        chain = _Chain(
            memory,
            inputs.last_token,
            inputs.settings,
            count=jnp.int32(0),
            tokens=jnp.zeros(inputs.rng_keys.shape, jnp.int32),
            # Zeros, if they are read, stand for drafts that are not put forward.
            probs=inputs.empty_probs(size),
            num_tokens=jnp.zeros_like(wanted),
            # With no row going, no loop makes a trip and no model is called.
            is_going=wanted > 0,
        )
        if first is not later:
            chain = run_if(chain.is_going.any(), functools.partial(grow, first), chain)
        chain = while_any(lambda chain: chain.is_going, functools.partial(grow, later), chain)
        return Proposal(chain.tokens, chain.num_tokens, chain.probs), chain.memory, chain.count

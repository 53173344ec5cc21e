"""How each row of a batch samples: its temperature, its filters and its logits processors.

Processors change the logits before temperature and filters, in a fixed order.

Logit bias adds a number to the logits of chosen tokens.

The repetition penalty divides the positive logits, and multiplies the negative ones, of every token
in prompt or output (CTRL, arXiv 1909.05858; as in transformers). Presence and frequency penalties
look at the output alone: logit - presence · (count > 0) - frequency · count. Repetition comes
first.

Suppression forbids tokens, those outside an allowed set, and an end that is too early. It comes
last, so that nothing can raise a forbidden token again.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.typing import DraftTokens, Logits, RowTokens, Tokens

ProcessorState = Any  # a pytree of arrays; each leaf's first axis is the row


class Processor(NamedTuple):
    """Pure functions that change logits before temperature and filters.

    The state describes everything a row has committed, the prompt included, so that the
    distribution at any position follows from the state there. Drafting and verifying apply the same
    processor, each position with the state that its own prefix leads to. The state after a rejected
    draft is dropped, so a rejected draft leaves no trace.

    Attributes:
      name: as messages call it.
      is_used: settings -> whether a request needs the processor at all; it is compiled into a
        program only if some request of the run does.
      init: (settings, *, prompt, stop_ids, vocab_size) -> the state of a row that has emitted
        nothing, arrays without the row's axis; the default settings give a neutral state.
      apply: (state, logits [b v]) -> logits [b v], where -inf forbids a token.
      update: (state, token [b]) -> the state after one more token, by default the same. Leaves that
        no token changes should be returned as they are.
    """

    name: str
    is_used: Callable[[Any], bool]
    init: Callable[..., ProcessorState]
    apply: Callable[[ProcessorState, Float32[Array, "b v"]], Float32[Array, "b v"]]
    update: Callable[[ProcessorState, RowTokens], ProcessorState] = lambda state, token: state


Bias: TypeAlias = Float32[Array, "b v"]  # what is added to each token's logit
TokenIds: TypeAlias = Sequence[Any]  # integers, Python's or NumPy's


def _init_bias(
    settings: Any, *, prompt: TokenIds, stop_ids: TokenIds, vocab_size: int
) -> Float32[Array, "v"]:
    del prompt, stop_ids
    bias = np.zeros([vocab_size], np.float32)
    for token_id, value in settings.logit_bias:
        bias[token_id] = value
    return jnp.asarray(bias)


def _add_bias(state: Bias, logits: Float32[Array, "b v"]) -> Float32[Array, "b v"]:
    return logits + state


class PenaltyState(NamedTuple):
    """What a row has said, in the prompt and since then, and the penalties for saying it again."""

    in_prompt: Bool[Array, "b v"]
    counts: Int32[Array, "b v"]
    repetition: Float32[Array, "b"]
    presence: Float32[Array, "b"]
    frequency: Float32[Array, "b"]


def _has_penalty(settings: Any) -> bool:
    return (
        settings.repetition_penalty != 1
        or settings.presence_penalty != 0
        or settings.frequency_penalty != 0
    )


def _init_penalties(
    settings: Any, *, prompt: TokenIds, stop_ids: TokenIds, vocab_size: int
) -> PenaltyState:
    del stop_ids
    in_prompt = np.zeros([vocab_size], bool)
    in_prompt[prompt] = True
    return PenaltyState(
        in_prompt=jnp.asarray(in_prompt),
        counts=jnp.zeros([vocab_size], jnp.int32),
        repetition=jnp.float32(settings.repetition_penalty),
        presence=jnp.float32(settings.presence_penalty),
        frequency=jnp.float32(settings.frequency_penalty),
    )


def penalise(state: PenaltyState, logits: Float32[Array, "b v"]) -> Float32[Array, "b v"]:
    """Returns the penalised logits."""
    repetition, presence, frequency = (
        leaf[:, None] for leaf in (state.repetition, state.presence, state.frequency)
    )
    is_emitted = state.counts > 0
    repeated = jnp.where(logits < 0, logits * repetition, logits / repetition)
    logits = jnp.where(state.in_prompt | is_emitted, repeated, logits)
    penalty = presence * is_emitted.astype(jnp.float32)
    penalty += frequency * state.counts.astype(jnp.float32)
    return logits - penalty


def count_token(state: PenaltyState, token: RowTokens) -> PenaltyState:
    """Counts one more token."""
    # A comparison is fused into the sum; a scatter would copy the counts.
    is_token = jnp.arange(state.counts.shape[1]) == token[:, None]
    return state._replace(counts=state.counts + is_token.astype(jnp.int32))


class SuppressionState(NamedTuple):
    """What is suppressed: forbidden tokens always, and those that end the row while tokens are
    missing that must be emitted before.
    """

    is_forbidden: Bool[Array, "b v"]
    is_stop: Bool[Array, "b v"]
    num_missing: Int32[Array, "b"]


def _has_suppression(settings: Any) -> bool:
    return bool(
        settings.allowed_token_ids is not None
        or settings.forbidden_token_ids
        or settings.min_new_tokens
    )


def _init_suppression(
    settings: Any, *, prompt: TokenIds, stop_ids: TokenIds, vocab_size: int
) -> SuppressionState:
    del prompt
    is_forbidden = np.zeros([vocab_size], bool)
    if settings.allowed_token_ids is not None:
        is_forbidden[:] = True
        is_forbidden[list(settings.allowed_token_ids)] = False
    is_forbidden[list(settings.forbidden_token_ids)] = True
    is_stop = np.zeros([vocab_size], bool)
    is_stop[[token_id for token_id in stop_ids if token_id < vocab_size]] = True
    return SuppressionState(
        jnp.asarray(is_forbidden), jnp.asarray(is_stop), jnp.int32(settings.min_new_tokens)
    )


def suppress(state: SuppressionState, logits: Float32[Array, "b v"]) -> Float32[Array, "b v"]:
    """Returns the logits, with -inf for a suppressed token."""
    is_early = state.is_stop & (state.num_missing > 0)[:, None]
    return jnp.where(state.is_forbidden | is_early, -jnp.inf, logits)


def count_down(state: SuppressionState, token: RowTokens) -> SuppressionState:
    """Counts one more token."""
    del token
    return state._replace(num_missing=state.num_missing - 1)


BIAS = Processor("logit bias", lambda settings: bool(settings.logit_bias), _init_bias, _add_bias)
PENALTIES = Processor("penalties", _has_penalty, _init_penalties, penalise, count_token)
SUPPRESSION = Processor("suppression", _has_suppression, _init_suppression, suppress, count_down)
PROCESSORS: tuple[Processor, ...] = (BIAS, PENALTIES, SUPPRESSION)  # in this order


COLDEST = float(jnp.finfo(jnp.float32).tiny)  # smaller temperatures are flushed to 0


class Switches(NamedTuple):
    """What a compiled program contains. Rows that do not use a part give it a neutral value.

    The processors stand in the order in which they are applied.
    """

    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    processors: tuple[Processor, ...] = ()
    logprobs: bool = False
    top_logprobs: bool = False
    draft_filters: bool = False  # a top-k and a top-p of the drafter's own


class SamplingSettings(struct.PyTreeNode):
    """How tokens are drawn, for each row.

    Attributes:
      temperature: [b]; 0, and what float32 flushes to it, takes the most likely token.
      top_k: [b]; how many of the most likely tokens to keep; 0 keeps all.
      top_p: [b]; keep the fewest most likely tokens whose probability reaches this; 1 keeps all.
      min_p: [b]; keep tokens at least this likely relative to the most likely one; 0 keeps all.
      states: one for each processor: what each row has committed so far.
      wants_top: [b]; rows that want the log-probabilities of the likeliest tokens; None where the
        switch for them is off.
      switches: what is compiled in.
    """

    temperature: Float32[Array, "b"]
    top_k: Int32[Array, "b"]
    top_p: Float32[Array, "b"]
    min_p: Float32[Array, "b"]
    states: tuple[ProcessorState, ...] = ()
    wants_top: Bool[Array, "b"] | None = None
    switches: Switches = struct.field(pytree_node=False, default=Switches())

    @property
    def is_random(self) -> Bool[Array, ""]:
        """Whether any row draws at random at all."""
        return (self.temperature >= COLDEST).any()

    def after(self, token: RowTokens) -> Self:
        """Returns the settings of the next position, after one more token of each row, [b]."""
        pairs = zip(self.switches.processors, self.states, strict=True)
        return self.replace(states=tuple(p.update(state, token) for p, state in pairs))

    def after_all(self, tokens: Tokens, valid: Bool[Array, "b t"]) -> Self:
        """Returns the settings after the valid tokens of [b t], the first few of each row."""
        settings = self
        for i in range(tokens.shape[1] if self.switches.processors else 0):
            new = settings.after(tokens[:, i])
            settings = jax.tree.map(functools.partial(_choose_rows, valid[:, i]), new, settings)
        return settings

    def process(self, logits: Float32[Array, "b v"]) -> Float32[Array, "b v"]:
        """Applies the processors at one position of each row."""
        for processor, state in zip(self.switches.processors, self.states, strict=True):
            logits = processor.apply(state, logits)
        return logits

    def without_processors(self) -> Self:
        """Returns the settings for logits that have been processed already."""
        return self.replace(states=(), switches=self.switches._replace(processors=()))


def _choose_rows(condition: Bool[Array, "b"], new: Array, old: Array) -> Array:
    if new is old:  # a leaf that no token changes, often [b v]: no program is needed for it
        return old
    return jnp.where(condition.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def process_drafts(
    logits: Logits,
    settings: SamplingSettings,
    drafts: DraftTokens,
    parents: Int32[Array, "b w"] | None = None,
) -> Logits:
    """Applies the processors along a block, each position with the state of its own prefix.

    The block is one token, which the processors have seen, and the drafts: a chain, or a tree with
    the parents at these places of the block, each before its child.
    """
    if not settings.switches.processors:
        return logits
    seen, processed = [settings.states], [settings.process(logits[:, 0])]
    for i in range(drafts.shape[1]):
        if parents is not None:
            # A sibling leaves no trace: the state is the parent's, not that of the draft before.
            states = jax.tree.map(functools.partial(_choose_state, parents[:, i]), *seen)
            settings = settings.replace(states=states)
        settings = settings.after(drafts[:, i])
        seen.append(settings.states)
        processed.append(settings.process(logits[:, i + 1]))
    return jnp.stack(processed, axis=1)


def _choose_state(place: RowTokens, *leaves: Array) -> Array:
    if all(leaf is leaves[0] for leaf in leaves):  # one that no token changes
        return leaves[0]
    return jnp.stack(leaves)[place, jnp.arange(place.shape[0])]

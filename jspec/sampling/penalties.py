"""Repetition, presence and frequency penalties.

The repetition penalty divides the positive logits, and multiplies the negative ones, of every token
in prompt or output (CTRL, arXiv 1909.05858; as in transformers). Presence and frequency penalties
look at the output alone: logit - presence · (count > 0) - frequency · count. Repetition comes
first.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.typing import RowTokens
from jspec.sampling.processor import Processor


class PenaltyState(NamedTuple):
    """What a row has said, in the prompt and since then, and the penalties for saying it again."""

    in_prompt: Bool[Array, "b v"]
    counts: Int32[Array, "b v"]
    repetition: Float32[Array, "b"]
    presence: Float32[Array, "b"]
    frequency: Float32[Array, "b"]


def is_used(settings: Any) -> bool:
    """Whether the request has any penalty."""
    return (
        settings.repetition_penalty != 1
        or settings.presence_penalty != 0
        or settings.frequency_penalty != 0
    )


def init(settings: Any, *, prompt: list[int], stop_ids: list[int], vocab_size: int) -> PenaltyState:
    """Returns one row's state; see `Processor`."""
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


def apply(state: PenaltyState, logits: Float32[Array, "b v"]) -> Float32[Array, "b v"]:
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


def update(state: PenaltyState, token: RowTokens) -> PenaltyState:
    """Counts one more token."""
    # A comparison is fused into the sum; a scatter would copy the counts.
    is_token = jnp.arange(state.counts.shape[1]) == token[:, None]
    return state._replace(counts=state.counts + is_token.astype(jnp.int32))


PROCESSOR = Processor("penalties", is_used, init, apply, update)

"""Logit bias: a number added to the logits of chosen tokens."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from jspec.common.typing import RowTokens
from jspec.sampling.processor import Processor


class BiasState(NamedTuple):
    """What is added.

    Attributes:
      bias: to each token's logit, [b v].
    """

    bias: Float32[Array, "b v"]


def is_used(settings: Any) -> bool:
    """Whether the request biases any token."""
    return bool(settings.logit_bias)


def init(settings: Any, *, prompt: list[int], stop_ids: list[int], vocab_size: int) -> BiasState:
    """Returns one row's state; see `InitFn`."""
    del prompt, stop_ids
    bias = np.zeros([vocab_size], np.float32)
    for token_id, value in settings.logit_bias:
        bias[token_id] = value
    return BiasState(jnp.asarray(bias))


def apply(state: BiasState, logits: Float32[Array, "b v"]) -> Float32[Array, "b v"]:
    """Returns logits + bias."""
    return logits + state.bias


def update(state: BiasState, token: RowTokens) -> BiasState:
    """Returns the state unchanged."""
    del token
    return state


PROCESSOR = Processor("logit bias", is_used, init, apply, update)

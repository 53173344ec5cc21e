"""Logit bias: a number added to the logits of chosen tokens."""

from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from jspec.sampling.processor import Processor

Bias: TypeAlias = Float32[Array, "b v"]  # what is added to each token's logit


def is_used(settings: Any) -> bool:
    """Whether the request biases any token."""
    return bool(settings.logit_bias)


def init(settings: Any, *, prompt: list[int], stop_ids: list[int], vocab_size: int) -> Bias:
    """Returns one row's state; see `Processor`."""
    del prompt, stop_ids
    bias = np.zeros([vocab_size], np.float32)
    for token_id, value in settings.logit_bias:
        bias[token_id] = value
    return jnp.asarray(bias)


def apply(state: Bias, logits: Float32[Array, "b v"]) -> Float32[Array, "b v"]:
    """Returns logits + bias."""
    return logits + state


PROCESSOR = Processor("logit bias", is_used, init, apply)

"""Suppressed tokens: forbidden ones, ones outside an allowed set, and an end that is too early."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.typing import RowTokens
from jspec.sampling.processor import Processor


class SuppressionState(NamedTuple):
    """What is suppressed: forbidden tokens always, and those that end the row while tokens are
    missing that must be emitted before.
    """

    is_forbidden: Bool[Array, "b v"]
    is_stop: Bool[Array, "b v"]
    num_missing: Int32[Array, "b"]


def is_used(settings: Any) -> bool:
    """Whether the request suppresses anything."""
    return bool(
        settings.allowed_token_ids is not None
        or settings.forbidden_token_ids
        or settings.min_new_tokens
    )


def init(
    settings: Any, *, prompt: list[int], stop_ids: list[int], vocab_size: int
) -> SuppressionState:
    """Returns one row's state; see `Processor`."""
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


def apply(state: SuppressionState, logits: Float32[Array, "b v"]) -> Float32[Array, "b v"]:
    """Returns the logits, with -inf for a suppressed token."""
    is_early = state.is_stop & (state.num_missing > 0)[:, None]
    return jnp.where(state.is_forbidden | is_early, -jnp.inf, logits)


def update(state: SuppressionState, token: RowTokens) -> SuppressionState:
    """Counts one more token."""
    del token
    return state._replace(num_missing=state.num_missing - 1)


PROCESSOR = Processor("suppression", is_used, init, apply, update)

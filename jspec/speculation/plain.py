"""Plain decoding: one target call, one token. What speculation must equal and must beat."""

import jax.numpy as jnp

from jspec.sampling import sample, sampling_probs
from jspec.speculation.ends import cut_at_end, silence
from jspec.speculation.logprobs import token_logprobs
from jspec.speculation.noise import plain_noise
from jspec.speculation.types import ModelParams, SpecState, StepInfo
from jspec.typing import ApplyFn


def plain_step(
    params: ModelParams, state: SpecState, *, target: ApplyFn
) -> tuple[SpecState, StepInfo]:
    """Feeds the newest token of every row and draws the next.

    Args:
      params: the target's parameters; a drafter's are not used.
      state: before the step.
      target: the model's ApplyFn.

    Returns:
      The state after it, and what happened.
    """
    cache = state.target_cache
    logits, _, cache = target(params.target, state.last_token[:, None], cache)
    settings = state.settings.after(state.last_token)
    probs = sampling_probs(logits, settings)
    noise = plain_noise(state.seed, cache.length + 1, probs.shape[-1], settings.is_random)
    token = sample(probs[:, 0], noise)[:, None]
    ones = jnp.ones_like(state.last_token)
    num_tokens, is_done = cut_at_end(state, token, ones)
    state = state.replace(
        target_cache=cache.commit(num_tokens),
        last_token=jnp.where(state.is_done, state.last_token, token[:, 0]),
        settings=settings,
    )
    zeros = jnp.zeros_like(num_tokens)
    logprobs = token_logprobs(logits, probs, token) if settings.switches.logprobs else None
    return silence(state, is_done), StepInfo(token, num_tokens, zeros, zeros, zeros, logprobs)

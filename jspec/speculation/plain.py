"""Plain decoding: one target call for one token, which speculation must equal and must beat."""

import jax
import jax.numpy as jnp

from jspec.common.typing import AnyLogits, ApplyFn, Probs, RowCounts, RowSeeds, RowTokens
from jspec.sampling.distribution import best_token, sample, sampling_probs
from jspec.sampling.noise import plain_noise
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.logprobs import token_logprobs
from jspec.speculation.round import as_read, cut_at_end, silence
from jspec.speculation.types import ModelParams, SpecState, StepInfo


def plain_step(
    params: ModelParams, state: SpecState, *, target: ApplyFn
) -> tuple[SpecState, StepInfo]:
    """Feeds the newest token of every row to the target, and draws the next token."""
    cache = state.target_cache
    # The last token is in no cache yet: it has position `length`, and the drawn one `length + 1`.
    logits, _, cache = target(params.target, state.last_token[:, None], cache)
    settings = state.settings.after(state.last_token)
    logits = as_read(logits, settings)
    token, probs = draw_next(logits[:, 0], settings, state.seed, cache.length + 1)
    token = token[:, None]
    ones = jnp.ones_like(state.last_token)
    num_tokens, is_done = cut_at_end(state, token, ones)
    state = state.replace(
        target_cache=cache.commit(num_tokens),
        # A done row goes through the motions, but keeps its last token and commits nothing.
        last_token=jnp.where(state.is_done, state.last_token, token[:, 0]),
        settings=settings,
    )
    zeros = jnp.zeros_like(num_tokens)
    logprobs = None if probs is None else token_logprobs(logits, probs, token, settings)
    return silence(state, is_done), StepInfo(token, num_tokens, zeros, zeros, zeros, logprobs)


def draw_next(
    logits: AnyLogits, settings: SamplingSettings, seed: RowSeeds, position: RowCounts
) -> tuple[RowTokens, Probs | None]:
    """Draws each row's next token, from logits [b v] before the processors; see `as_read`.

    The token's position, counted from the start of the prompt, keys the noise. Where
    log-probabilities are wanted, the tokens' distributions [b 1 v] are returned too.
    """
    logits, settings = settings.process(logits), settings.without_processors()
    has_logprobs = settings.switches.logprobs

    def by_distribution() -> tuple[RowTokens, Probs | None]:
        probs = sampling_probs(logits[:, None], settings)
        noise = plain_noise(seed, position, probs.shape[-1], settings.is_random)
        return sample(probs[:, 0], noise), probs if has_logprobs else None

    def by_best() -> tuple[RowTokens, Probs | None]:
        probs = sampling_probs(logits[:, None], settings) if has_logprobs else None
        return best_token(logits), probs

    # Where all temperatures are 0, no distribution over the vocabulary need be computed.
    return jax.lax.cond(settings.is_random, by_distribution, by_best)

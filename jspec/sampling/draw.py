"""The draw of plain decoding: one token of each row, with the noise of its absolute position."""

import jax

from jspec.common.typing import AnyLogits, Probs, RowCounts, RowSeeds, RowTokens
from jspec.sampling.distribution import best_token, sample, sampling_probs
from jspec.sampling.noise import plain_noise
from jspec.sampling.settings import SamplingSettings


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

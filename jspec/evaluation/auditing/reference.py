"""The sampled distribution in float64, written independently: sorts, one position at a time."""

from collections.abc import Sequence

import numpy as np

from jspec.generation.request import Settings


def reference_distribution(
    logits: np.ndarray,
    token_ids: Sequence[int],
    settings: Settings,
    *,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: Sequence[int] = (),
) -> np.ndarray:
    """Returns the next token's distribution over an alphabet, [k] float64; nothing else is allowed.

    Args:
      logits: the target's, of the alphabet's tokens, [k].
      token_ids: the alphabet, [k].
      settings: how tokens are sampled.
      prompt: the request's ids.
      output: ids emitted so far.
      stop_ids: tokens that end the row.
    """
    ids = np.asarray(token_ids)
    logits = np.asarray(logits, np.float64) + [dict(settings.logit_bias).get(i, 0.0) for i in ids]
    repeated = np.where(logits < 0, settings.repetition_penalty, 1 / settings.repetition_penalty)
    logits = np.where(np.isin(ids, [*prompt, *output]), logits * repeated, logits)
    counts = np.array([list(output).count(i) for i in ids])
    logits -= settings.presence_penalty * (counts > 0) + settings.frequency_penalty * counts
    logits[np.isin(ids, settings.forbidden_token_ids)] = -np.inf
    if len(output) < settings.min_new_tokens:
        logits[np.isin(ids, stop_ids)] = -np.inf
    if settings.temperature == 0:
        return (np.arange(len(ids)) == np.argmax(logits)).astype(float)
    return _filtered(logits / settings.temperature, settings)


def _filtered(logits: np.ndarray, settings: Settings) -> np.ndarray:
    """Applies top-k, top-p and min-p; tokens that tie with the last one stay."""
    if settings.top_k:
        logits = _keep_from(logits, np.sort(logits)[::-1][min(settings.top_k, len(logits)) - 1])
    if settings.top_p < 1:
        probs = np.sort(_softmax(logits))[::-1]
        last = np.argmax(np.cumsum(probs) >= settings.top_p - 1e-12)
        logits = _keep_from(logits, np.sort(logits)[::-1][last])
    if settings.min_p:
        logits = _keep_from(logits, logits.max() + np.log(settings.min_p))
    return _softmax(logits)


def _keep_from(logits: np.ndarray, threshold: float) -> np.ndarray:
    return np.where(logits >= threshold, logits, -np.inf)


def _softmax(logits: np.ndarray) -> np.ndarray:
    probs = np.exp(logits - logits.max())
    return probs / probs.sum()

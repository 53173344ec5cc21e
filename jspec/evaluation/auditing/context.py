"""The short context that audited rows have in common, and the target's logits after it."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from jspec.common.errors import InputError
from jspec.common.typing import Params
from jspec.generation.request import Settings
from jspec.models import init_cache, make_apply
from jspec.weights.resolver import LoadedModel
from jspec.weights.vocabulary import mask_padding, used_vocab_size

_ALPHABET_SIZE = 4
_PATHS_A_CALL = 32  # of ten tokens: few enough rows for the matrix products of a round


class Context(NamedTuple):
    """What the rows have in common.

    Attributes:
      prompt: token ids.
      first: the first token of every row's output, so that all others are drawn in rounds.
      alphabet: the only tokens that may follow.
    """

    prompt: list[int]
    first: int
    alphabet: list[int]


def choose_context(target: LoadedModel, settings: Settings) -> Context:
    """Returns a short context that repeats itself, of likely tokens that the settings allow.

    Raises:
      InputError: they allow fewer than two tokens.
    """
    start = np.array([[used_vocab_size(target) // 2]], np.int32)
    logits = np.array(_jit_logits(target)(target.params, start)[0, -1])
    for token_id, value in dict(settings.logit_bias).items():
        logits[token_id] += value
    logits[[*target.config.eos_ids, *settings.forbidden_token_ids]] = -np.inf
    if settings.allowed_token_ids is not None:
        logits[~np.isin(np.arange(len(logits)), settings.allowed_token_ids)] = -np.inf
    best = np.argsort(-logits)[:_ALPHABET_SIZE]
    alphabet = [int(i) for i in best if np.isfinite(logits[i])]
    if len(alphabet) < 2:
        raise InputError(f"expected settings that allow two tokens, got {len(alphabet)}")
    return Context([alphabet[i % len(alphabet)] for i in (0, 1, 2, 0, 1, 3)], alphabet[0], alphabet)


def path_logits(target: LoadedModel, context: Context, num_tokens: int) -> np.ndarray:
    """Returns the target's logits of the alphabet along every path of that many tokens.

    Returns:
      [k, ..., k, num_tokens, k] with num_tokens - 1 leading axes: entry [a, b, ..., t] belongs to
      the position after t tokens of the path a, b, ...
    """
    size, begin = len(context.alphabet), len(context.prompt)
    paths = itertools.product(context.alphabet, repeat=num_tokens - 1)
    blocks = np.array([[*context.prompt, context.first, *path] for path in paths], np.int32)
    logits_of = _jit_logits(target)
    chunks = [
        np.asarray(logits_of(target.params, blocks[i : i + _PATHS_A_CALL]))[:, begin:]
        for i in range(0, len(blocks), _PATHS_A_CALL)
    ]
    logits = np.concatenate([chunk[..., context.alphabet] for chunk in chunks])
    return logits.reshape(*[size] * (num_tokens - 1), num_tokens, size)


def _jit_logits(target: LoadedModel) -> Callable[[Params, np.ndarray], jax.Array]:
    """Returns a function from parameters and texts [b t] to logits: one pass, an empty cache."""
    apply = mask_padding(make_apply(target.config), target)
    dtype = target.params["embedding"].dtype

    @jax.jit
    def run(params: Params, tokens: jax.Array) -> jax.Array:
        batch_size, capacity = tokens.shape
        cache = init_cache(target.config, batch_size=batch_size, capacity=capacity, dtype=dtype)
        return apply(params, tokens, cache)[0]

    return run

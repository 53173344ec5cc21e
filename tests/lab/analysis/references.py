"""The distributions of drafts, written once more, slowly and in float64: what the estimates are
held to.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models import init_cache, make_apply


def full_logits(model, text, layers=None):
    """Returns the logits after every token, [n v], of one pass over the whole text."""
    cache = init_cache(model.config, batch_size=1, capacity=len(text), dtype=jnp.float32)
    apply = _program(model.config, layers)
    return np.asarray(apply(model.params, jnp.array([text]), cache)[0][0], np.float64)


@functools.cache
def _program(config, layers):
    return jax.jit(make_apply(config, layers))


def softmax(logits, temperature=1.0, size=None):
    """Returns the distributions, those of ids below `size`; temperature 0 takes the best."""
    logits = np.array(logits, np.float64)
    if size is not None:
        logits[:, size:] = -np.inf
    if temperature == 0:
        return np.eye(logits.shape[1])[logits.argmax(axis=1)]
    exp = np.exp((logits - logits.max(axis=1, keepdims=True)) / temperature)
    return exp / exp.sum(axis=1, keepdims=True)


def one_hot(tokens, size):
    """Returns distributions [n v]; zeros for None."""
    distributions = np.zeros([len(tokens), size])
    for row, token in enumerate(tokens):
        if token is not None:
            distributions[row, token] = 1
    return distributions


def look_up(text, end, max_match=8):
    """Returns what followed the longest, and then latest, earlier match of text[:end]'s end."""
    best = (0, None)
    for place in range(1, end):
        length = 0
        while length < min(place, max_match) and text[place - 1 - length] == text[end - 1 - length]:
            length += 1
        if length and length >= best[0]:
            best = (length, text[place])
    return best[1]


def count_continuations(text, end, orders=(4, 3, 2), window=512):
    """Returns how often each token followed the longest n-gram at the end, and last where."""
    start = max(0, end - window)
    for order in orders:
        context, counts, last = text[end - order + 1 : end], collections.Counter(), {}
        if end - order + 1 < start:
            continue
        for place in range(start + order - 1, end):
            if text[place - order + 1 : place] == context:
                counts[text[place]] += 1
                last[text[place]] = place
        if counts:
            return counts, last
    return collections.Counter(), {}


def most_frequent(text, end, **options):
    """Returns the most frequent continuation, of equals the latest; None without any."""
    counts, last = count_continuations(text, end, **options)
    return max(counts, key=lambda token: (counts[token], last[token]), default=None)


def count_distributions(text, ends, size, temperature, **options):
    """Returns the distributions in proportion to the counts, zeros where there are none."""
    distributions = np.zeros([len(ends), size])
    for row, end in enumerate(ends):
        for token, count in count_continuations(text, end, **options)[0].items():
            distributions[row, token] = count ** (1 / temperature)
        distributions[row] /= max(distributions[row].sum(), 1e-300)
    return distributions

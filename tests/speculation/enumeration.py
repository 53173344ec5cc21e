"""Exact distributions of what a rule emits, by summing over every draft, verdict and next token.

Distributions are tables [previous token, last token, next token]. A rule's own probabilities, which
it gives in float32, are enumerated for every context of two tokens; all else is float64. Rounds are
then composed, so that the joint distribution over several of them is exact.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.speculation.types import Proposal

NUM_TOKENS = 6  # of the joint distribution
NUM_ROUNDS = 3


def full_width(context, width):
    """Returns a row's number of valid drafts: all of them."""
    del context
    return width


def all_counts(context, width):
    """Returns any number from 0 to width, as a function of the context."""
    return (3 * context[0] + context[1]) % (width + 1)


def random_distributions(rng, shape, concentration=0.5, zeros=0.0):
    """Returns random distributions, float32 numbers in float64, with about that share of exact
    zeros.
    """
    distributions = rng.dirichlet([concentration] * shape[-1], shape[:-1])
    keep = rng.uniform(size=shape) >= zeros
    keep |= np.arange(shape[-1]) == distributions.argmax(axis=-1)[..., None]
    distributions = distributions * keep
    return as_float32(distributions / distributions.sum(axis=-1, keepdims=True))


def as_float32(distributions):
    """Returns what a rule is told of the distributions, in float64."""
    return np.asarray(distributions, np.float32).astype(np.float64)


def truncated(distributions, top_k):
    """Returns the distributions of the `top_k` most likely tokens only."""
    kept = np.where(
        distributions >= -np.sort(-distributions, axis=-1)[..., top_k - 1, None], distributions, 0
    )
    return as_float32(kept / kept.sum(axis=-1, keepdims=True))


def without_earlier(tokens, distributions):
    """Returns the distributions [b k v] of siblings drawn one after the other without replacement.

    Earlier siblings' tokens [b k] are taken out; zeros are padding, and take nothing out.
    """
    distributions = np.array(distributions, np.float64)
    is_padding = distributions.sum(axis=-1) == 0
    for row, path in enumerate(np.asarray(tokens)):
        for i, token in enumerate(path[:-1]):
            if not is_padding[row, i]:
                distributions[row, i + 1 :, token] = 0
    total = distributions.sum(axis=-1, keepdims=True)
    return jnp.asarray(distributions / np.where(total > 0, total, 1), jnp.float32)


class Paths(NamedTuple):
    """Every context with every path of drafts.

    Attributes:
      contexts: the contexts, in order.
      index: of each path's context, [n].
      chains: context and drafts, [n 2+width].
      weights: the probability of drafting each path in its context, [n].
      target_probs: [n width+1 v], float32.
      proposal: of n rows.
    """

    contexts: list
    index: np.ndarray
    chains: np.ndarray
    weights: np.ndarray
    target_probs: jnp.ndarray
    proposal: Proposal


def enumerate_paths(target, draft, width, kind="sampled", counts_of=full_width, stop_below=0.0):
    """Returns all `Paths`, also those of weight 0.

    Args:
      target: distributions.
      draft: distributions.
      width: drafts a round.
      kind: "sampled" from `draft`; "deterministic", the token that `draft` likes least, so that
        most are refused; or "one-hot", the same drafts with their distribution spelt out.
      counts_of: a row's number of valid drafts from its context.
      stop_below: a row drafts no further where its distribution's maximum is below this.
    """
    vocab = target.shape[-1]
    contexts = list(itertools.product(range(vocab), repeat=2))
    paths = list(itertools.product(range(vocab), repeat=width))
    chains = np.array([[*context, *path] for context in contexts for path in paths])
    if kind != "sampled":
        draft = np.eye(vocab)[draft.argmin(axis=-1)]
    draft_probs = draft[chains[:, :width], chains[:, 1 : 1 + width]]
    weights = np.prod(np.take_along_axis(draft_probs, chains[:, 2:, None], 2)[..., 0], axis=1)
    counts = np.repeat([counts_of(context, width) for context in contexts], len(paths))
    is_sure = np.cumprod(draft_probs.max(axis=-1) >= stop_below, axis=1)
    proposal = Proposal(
        tokens=jnp.asarray(chains[:, 2:], jnp.int32),
        num_tokens=jnp.asarray(np.minimum(counts, is_sure.sum(axis=1)), jnp.int32),
        probs=None if kind == "deterministic" else jnp.asarray(draft_probs, jnp.float32),
    )
    return Paths(
        contexts,
        np.repeat(np.arange(len(contexts)), len(paths)),
        chains,
        weights,
        jnp.asarray(target[chains[:, :-1], chains[:, 1:]], jnp.float32),
        proposal,
    )


@functools.partial(jax.jit, static_argnames="rule")
def acceptance_probs(rule, target_probs, proposal):
    """Returns a rule's `acceptance_probs` by one program: each operation alone takes far longer."""
    return rule.acceptance_probs(target_probs, proposal)


@functools.partial(jax.jit, static_argnames="rule")
def next_token_probs(rule, target_probs, proposal, num_accepted):
    """Returns a rule's `next_token_probs` by one program, whatever was accepted."""
    return rule.next_token_probs(target_probs, proposal, num_accepted)


def kept_probs(rule, paths):
    """Returns the probability of exactly 0 to width kept drafts on each path, [n width+1]."""
    width = paths.proposal.width
    accept = acceptance_probs(rule, paths.target_probs, paths.proposal)
    accept = np.asarray(accept, np.float64)
    accept = np.where(np.arange(width) < np.asarray(paths.proposal.num_tokens)[:, None], accept, 0)
    at_least = np.cumprod(np.pad(accept, ((0, 0), (1, 0)), constant_values=1.0), axis=1)
    return at_least * (1 - np.pad(accept, ((0, 0), (0, 1))))


def expected_accepted(rule, paths):
    """Returns how many drafts are kept on average in each context."""
    kept = kept_probs(rule, paths) @ np.arange(paths.proposal.width + 1)
    return np.bincount(paths.index, paths.weights * kept)


def one_round(rule, paths):
    """Returns, for m = 1 .. width + 1, the probability [context, m emitted tokens] of a round."""
    width, vocab = paths.proposal.width, paths.target_probs.shape[-1]
    exactly = kept_probs(rule, paths)
    emitted = {}
    for kept in range(width + 1):
        counts = jnp.full(len(paths.index), kept, jnp.int32)
        distribution = next_token_probs(rule, paths.target_probs, paths.proposal, counts)
        probs = (paths.weights * exactly[:, kept])[:, None] * np.asarray(distribution, np.float64)
        out = np.zeros((len(paths.contexts), *[vocab] * (kept + 1)))
        np.add.at(out, (paths.index, *paths.chains[:, 2 : 2 + kept].T), probs)
        emitted[kept + 1] = out
    return emitted


def joint_distribution(emitted, target, start):
    """Composes rounds from one context into the distribution of the first NUM_TOKENS tokens.

    After NUM_ROUNDS rounds, what is missing is drawn from the target.
    """
    vocab = target.shape[-1]
    pending = {0: np.ones(())}
    finished = np.zeros([vocab] * NUM_TOKENS)
    for _ in range(NUM_ROUNDS):
        after = {}
        for length, probs in pending.items():
            for m, round_probs in emitted.items():
                by_context = round_probs.reshape(vocab, vocab, *[vocab] * m)
                grown = extend(probs, by_context, length, start)
                if length + m >= NUM_TOKENS:
                    finished += grown.sum(axis=tuple(range(NUM_TOKENS, length + m)))
                else:
                    after[length + m] = after.get(length + m, 0) + grown
        pending = after
    for length, probs in pending.items():
        for n in range(length, NUM_TOKENS):
            probs = extend(probs, target, n, start)
        finished += probs
    return finished


def extend(probs, by_context, length, start):
    """Multiplies the distribution of `length` tokens with what follows their last two."""
    new = (1,) * (by_context.ndim - 2)
    if length == 0:
        return probs * by_context[start]
    if length == 1:
        return probs.reshape(-1, *new) * by_context[start[1]]
    return probs.reshape(*probs.shape, *new) * by_context


def target_joint(target, start):
    """Returns the distribution of the first NUM_TOKENS tokens that the target itself gives."""
    probs = np.ones(())
    for n in range(NUM_TOKENS):
        probs = extend(probs, target, n, start)
    return probs


def worst_error(rule, target, draft, width, kind="sampled", **options):
    """Returns how far the joint distribution of what is emitted is from the target's, at most."""
    return worst_error_of(rule, target, enumerate_paths(target, draft, width, kind, **options))


def worst_error_of(rule, target, paths):
    """Returns the same for paths that are given; `target` has g's or the model's distributions."""
    emitted = one_round(rule, paths)
    total = sum(probs.reshape(len(paths.contexts), -1).sum(axis=1) for probs in emitted.values())
    np.testing.assert_allclose(total, 1, atol=2e-6)  # every path is counted once
    return max(
        np.abs(joint_distribution(emitted, target, start) - target_joint(target, start)).max()
        for start in paths.contexts
    )

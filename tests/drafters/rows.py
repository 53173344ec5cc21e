"""Rows of which a drafter has seen many tokens, some or few, and has drafted for none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafters import DrafterOptions, DrafterSpec, make_drafter
from tests import tiny
from tests.speculation import drive

WIDTH, CAPACITY = 3, 160
LENGTHS = np.array([140, 66, 3])
TEXT = np.random.default_rng(0).integers(0, 61, (len(LENGTHS), CAPACITY)).astype(np.int32)
LAST = TEXT[np.arange(len(LENGTHS)), LENGTHS]  # each row's newest token


@functools.lru_cache(maxsize=16)
def _observe(drafter):
    return jax.jit(drafter.observe)


def observe(pair, drafter, params, hidden=None, block=5):
    """Returns the drafter's state after the rows, of which other numbers of tokens came at a time.

    Args:
      pair: with the target.
      drafter: it.
      params: its own.
      hidden: what it observes of the target; None computes it.
      block: tokens at a time.
    """
    hidden = tiny.outputs_of(pair, TEXT, drafter.hidden_layers) if hidden is None else hidden
    hidden = np.asarray(hidden)  # of which each slice would be a program
    step, state = _observe(drafter), drafter.init(len(LENGTHS), CAPACITY)
    for start in range(0, LENGTHS.max(), block):
        valid = jnp.asarray(np.arange(block) < (LENGTHS - start)[:, None])
        part = slice(start, start + block)
        state = step(params, state, TEXT[:, part], hidden[:, part], valid)
    return state


def show(drafter, state, tokens, counts=None, params=None):
    """Returns the state after the first so many tokens of each row, which has no hidden states."""
    counts = [len(row) for row in tokens] if counts is None else counts
    width = max(map(len, tokens))
    padded = np.array([[*row, *[0] * (width - len(row))] for row in tokens], np.int32)
    valid = np.arange(width) < np.asarray(counts)[:, None]
    hidden = np.zeros((*padded.shape, 1), np.float32)
    return _observe(drafter)(params, state, padded, hidden, valid)


def propose(pair, drafter, params, state, temperature=0.0, limit=WIDTH, **options):
    """Returns the drafter's proposal after the rows, and its state."""
    return drive.propose(pair, drafter, params, state, LAST, limit, temperature, **options)


def spec(width=WIDTH, *, head=None, draft=None, vocab_size=61, target=tiny.CONFIG, **options):
    """Returns what a drafter for the tiny target is built from; `head` is a folder."""
    options = DrafterOptions(draft_head=None if head is None else str(head), **options)
    return DrafterSpec(width, target, vocab_size, tiny.CONFIG, jnp.float32, draft, options)


def build(name, width=WIDTH, **fields):
    """Returns the drafter of that name with its parameters; see `spec`."""
    return make_drafter(name, spec(width, **fields))


def paths_of(proposal, row):
    """Returns every draft's path as tokens, of the drafts that are put forward."""
    paths = []
    tokens, parents = np.asarray(proposal.tokens[row]), np.asarray(proposal.parents[row])
    for draft in range(int(proposal.num_tokens[row])):
        before = () if parents[draft] < 0 else paths[parents[draft]]
        paths.append((*before, int(tokens[draft])))
    return paths

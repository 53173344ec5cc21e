"""Rows of which a drafter has seen many tokens, some or few, and has drafted for none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests import tiny

WIDTH, CAPACITY = 3, 160
LENGTHS = np.array([140, 66, 3])
TEXT = np.random.default_rng(0).integers(0, 61, (len(LENGTHS), CAPACITY)).astype(np.int32)
LAST = TEXT[np.arange(len(LENGTHS)), LENGTHS]


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

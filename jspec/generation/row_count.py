"""How many rows of a batch a round computes: those after the last one that runs are left out.

    rows      0   1   2   3 | 4   5   6   7
    running   x   x       x |                   the state has rows 0 to 3

A round takes longer with more rows, whether they run or not, and a server has slots for more
requests than there mostly are. Rows stay at their places: a new request takes the first free one,
so that those at the end are empty again before long.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jspec.speculation.types import SpecState

_STEP = 4  # a round of four rows takes at most half as long again as one of one row


def row_counts(num_rows: int) -> tuple[int, ...]:
    """Returns the numbers of rows for which rounds are compiled, rising to `num_rows`.

    Each is a program, and a quarter of the next; a single row has one of its own, as its products
    are the fastest. Few rows, up to 7, have no others.
    """
    counts = [num_rows]
    while counts[0] >= 2 * _STEP:
        counts.insert(0, counts[0] // _STEP)
    return (1, *counts) if 1 < counts[0] < num_rows else tuple(counts)


def fitted(
    state: SpecState,
    num_needed: int,
    counts: Sequence[int],
    make_empty: Callable[[int], SpecState],
) -> SpecState:
    """Returns a state of the fewest of `counts` rows that are enough; what is left out is empty.

    `make_empty` returns a state of as many rows as are to be added.
    """
    # Step by step, so that few programs are compiled for it.
    while len(state.last_token) < num_needed:
        found = len(state.last_token)
        more = counts[counts.index(found) + 1] - found
        state = _with_more(state, make_empty(more))
    while (place := counts.index(len(state.last_token))) and counts[place - 1] >= num_needed:
        state = _with_fewer(state, counts[place - 1])
    return state


# The jit boundary. Nothing is donated: results have other shapes than the arguments.
@jax.jit
def _with_more(state: SpecState, others: SpecState) -> SpecState:
    return jax.tree.map(lambda own, more: jnp.concatenate([own, more]), state, others)


@functools.partial(jax.jit, static_argnums=1)
def _with_fewer(state: SpecState, num_rows: int) -> SpecState:
    return jax.tree.map(lambda leaf: leaf[:num_rows], state)

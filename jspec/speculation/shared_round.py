"""Drafts in a batch: a round is as wide as its widest row, and all rows wait for it.

What a row would draft alone is therefore not always worth it for the batch. With E_r(c) the tokens
that row r is expected to emit in a round with c drafts, the most that any row may have is the c
that maximises sum_r E_r(min(c, c_r)) / seconds(c), where c_r is what the row wants itself.
"""

import jax.numpy as jnp

from jspec.common.typing import RowCounts, RowFlags
from jspec.speculation.control import Control

_FORBIDDEN = 1e6  # seconds of a number of drafts that a row may not have
_MARGIN = 1.1  # times the speed of no drafts that drafts must promise: rates lag, costs are guessed


def with_own_costs(control: Control, is_free: RowFlags) -> Control:
    """Returns the control with what rounds of as many rows as there are cost.

    They lie between those of one row and those of all. Only the rows that are free count that: the
    others' drafts, and so their tokens, must not depend on their company.
    """
    if len(is_free) >= control.num_rows:
        return control
    share = (len(is_free) - 1) / (control.num_rows - 1)
    fewer = control.alone + (control.costs - control.alone) * share
    return control.replace(costs=jnp.where(is_free[:, None, None], fewer, control.costs))


def agree(
    control: Control, kind: RowCounts, wanted: RowCounts, is_running: RowFlags, is_free: RowFlags
) -> RowCounts:
    """Returns how many drafts each row has, [b]: at most those that it wants.

    Args:
      control: of the rows; where it knows of one row alone, they have what they want.
      kind: of each row's proposal.
      wanted: drafts that each row wants, or has.
      is_running: whether the row takes part.
      is_free: whether the row's tokens are the same with any number of drafts; others keep theirs,
        as what they say must not depend on their company.
    """
    if control.num_rows == 1 or kind.shape[0] == 1:
        return wanted
    numbers = jnp.asarray(control.numbers, jnp.int32)
    own = jnp.sum(numbers < wanted[:, None], axis=-1)  # the place of each row's number
    places = jnp.minimum(jnp.arange(len(control.numbers)), own[:, None])
    expected = control.expected_tokens(kind, is_proven=False)
    tokens = jnp.take_along_axis(expected, places, axis=1)
    seconds = control.costs[jnp.arange(kind.shape[0]), control.drafter_of(kind)]
    # A row that may not draft is no reason for the others not to.
    seconds = jnp.where((seconds < _FORBIDDEN).all(axis=1, keepdims=True), seconds, 0.0)
    seconds = seconds * jnp.where(numbers > 0, _MARGIN, 1.0)

    def total(of_rows: jnp.ndarray) -> jnp.ndarray:
        return jnp.sum(jnp.where(is_running[:, None], of_rows, 0.0), axis=0)

    # Rows differ in seconds by their contexts alone; where none runs, nothing is chosen.
    most = numbers[jnp.argmax(total(tokens) / jnp.maximum(total(seconds), 1e-9))]
    return jnp.where(is_free, jnp.minimum(wanted, most), wanted)

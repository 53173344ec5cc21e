"""How many drafts each row of a batch gets, where the rows share a call of one size.

Side by side (see `packing`) a round costs by the tokens that all rows verify together. So drafts
are granted where they are most likely to be kept, whoever's they are: the probability that draft i
of row r is kept is a_r·l_r^(i-1), by the row's own estimates, and what is granted is the start of
the list of all wanted drafts in falling order of it. The probabilities never rise along a row, and
of equal ones the earlier place goes first, so no draft is granted without those before it.

    row 0   0.9  0.8  0.7               sorted   0.9  0.8  0.7  0.6  0.4  0.3  0.2
    row 1   0.6  0.4  0.2               call of 3 rows and 3 drafts: row 0 gets 3, the others none
    row 2   0.3                         of 3 rows and 5: 3, 2, 0

How many are granted altogether: those that fill the size of a call for which the batch is expected
to emit the most tokens per second, by the measured seconds of rounds of so many tokens.

Only rows that say the same with any number of drafts share. The others have what they want: their
tokens must not depend on their company.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jspec.common.typing import RowCounts, RowFlags
from jspec.speculation.control import FORBIDDEN, MARGIN, Control, Costs

_FIRST_SHARES = (0.25, 0.5)  # drafts a row: between none and one a token costs most of its price


def call_sizes(batch_size: int, numbers: Sequence[int]) -> tuple[int, ...]:
    """Returns the tokens of the calls that are compiled for that many rows, rising.

    Each is a program of the whole target. The last one has room for all drafts of all rows.
    """
    drafts = (*_FIRST_SHARES, *numbers[1:])
    return tuple(sorted({batch_size + -int(-number * batch_size // 1) for number in drafts}))


def grant(
    control: Control,
    costs: Costs,
    kind: RowCounts,
    wanted: RowCounts,
    is_running: RowFlags,
    is_free: RowFlags,
    sizes: Sequence[int],
) -> RowCounts:
    """Returns how many drafts each row gets, [b]: at most those that it wants.

    Args:
      control: of the rows.
      costs: see `Control.round_costs`.
      kind: of each row's proposal.
      wanted: drafts that each row has and wants.
      is_running: whether the row takes part.
      is_free: whether the row's tokens are the same with any number of drafts.
      sizes: tokens of the calls that there are, rising; see `call_sizes`.
    """
    is_forced = control.forced[jnp.arange(kind.shape[0]), kind] >= 0
    is_shared = is_running & is_free & ~is_forced
    kept = control.kept_probs(kind)
    place = jnp.arange(kept.shape[1])
    is_asked = (place < wanted[:, None]) & is_shared[:, None]
    # By place first, so that of equal ones the earlier goes first; then by row.
    gains = jnp.where(is_asked, kept, -1.0).T.reshape(-1)
    order = jnp.argsort(-gains, stable=True)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)), unique_indices=True)
    # In the call in any case: a token of each row, and the drafts of rows that do not share.
    fixed = jnp.where(is_running & ~is_shared, wanted, 0)
    is_fixed = place < fixed[:, None]
    used = is_running.sum() + fixed.sum()
    most = jnp.clip(jnp.asarray(sizes, jnp.int32) - used, 0, is_asked.sum())
    numbers = jnp.concatenate([jnp.zeros_like(most[:1]), most])  # of drafts to grant
    gained = jnp.pad(jnp.cumsum(jnp.maximum(gains[order], 0.0)), (1, 0))[numbers]
    certain = is_running.sum().astype(jnp.float32) + jnp.where(is_fixed, kept, 0.0).sum()
    seconds = _seconds(control, costs, kind, used + numbers, is_running, sizes)
    best = jnp.argmax((certain + gained) / (seconds * jnp.where(numbers > 0, MARGIN, 1.0)))
    rank = rank.reshape(kept.shape[::-1]).T
    is_granted = is_asked & (rank < jnp.take(numbers, best))
    return jnp.where(is_shared, is_granted.sum(axis=1, dtype=jnp.int32), wanted)


def _seconds(
    control: Control,
    costs: Costs,
    kind: RowCounts,
    tokens: Int32[Array, "n"],
    is_running: RowFlags,
    sizes: Sequence[int],
) -> Float32[Array, "n"]:
    """Returns the mean of the running rows' costs of rounds of so many tokens, [n].

    A round of no drafts is a plain one. Otherwise the smallest call that is enough is made, and
    costs lie between those of the numbers of drafts that were measured.
    """
    batch_size = kind.shape[0]
    known = costs[jnp.arange(batch_size), control.drafter_of(kind)]
    # A row that may not draft says nothing of what drafts cost the others.
    counts = is_running & (known < FORBIDDEN).all(axis=1)
    counts = jnp.where(counts.any(), counts, True)
    weights = counts.astype(jnp.float32)[:, None]
    mean = jnp.sum(jnp.where(counts[:, None], known, 0.0), axis=0) / weights.sum()
    sizes_known = batch_size * (1 + jnp.asarray(control.numbers, jnp.float32))
    place = jnp.sum(jnp.asarray(sizes) < tokens[:, None], axis=1)
    size = jnp.asarray(sizes, jnp.float32)[jnp.minimum(place, len(sizes) - 1)]
    has_drafts = tokens > is_running.sum()
    return jnp.interp(jnp.where(has_drafts, size, 0.0), sizes_known, mean)

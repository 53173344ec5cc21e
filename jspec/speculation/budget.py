"""How many drafts each row of a batch gets, where the rows share a call of one size.

Side by side (see `packing`) a round costs by the tokens that all rows verify together. So drafts
are granted where they are most likely to be kept, in whichever row: the probability that draft i
of row r is kept is a_r·l_r^(i-1), by the row's own estimates, and what is granted is the start of
the list of all wanted drafts in falling order of it. The probabilities never rise along a row, and
of equal ones the earlier place goes first, so no draft is granted without those before it.

    row 0   0.9  0.8  0.7               sorted   0.9  0.8  0.7  0.6  0.4  0.3  0.2
    row 1   0.6  0.4  0.2               call of 3 rows and 3 drafts: row 0 gets 3, the others none
    row 2   0.3                         of 3 rows and 5: 3, 2, 0

How many are granted altogether: those that fill the size of a call for which the batch is expected
to emit the most tokens per second, by the measured seconds of rounds of as many tokens.

Only rows whose tokens are the same with any number of drafts share. The others get what they want:
their tokens must not depend on other rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jspec.common.typing import RowCounts
from jspec.speculation.control import FORBIDDEN, MARGIN, Demand

_FIRST_SHARES = (0.25, 0.5)  # drafts a row: between none and one a token costs most of its price


class CallSize(NamedTuple):
    """A verify call on blocks side by side.

    Attributes:
      tokens: in the call, of all rows together.
      drafts: that one row may have.
    """

    tokens: int
    drafts: int


def call_sizes(
    batch_size: int, numbers: Sequence[int], *, reads_logits: bool = False
) -> tuple[CallSize, ...]:
    """Returns the calls that are compiled for that many rows; their tokens rise.

    Each is a program of the whole target. The last one has room for all drafts of all rows. Where
    processors or others read the logits of whole blocks, smaller calls have less wide ones.
    """
    drafts = (*_FIRST_SHARES, *numbers[1:])
    tokens = sorted({batch_size + -int(-number * batch_size // 1) for number in drafts})
    narrow = numbers[-2] if reads_logits and len(numbers) > 2 else numbers[-1]
    least_wide = batch_size * (1 + narrow)
    return tuple(CallSize(n, narrow if n < least_wide else numbers[-1]) for n in tokens)


def smallest_call(
    tokens: Int32[Array, "n"], drafts: Int32[Array, "n"], sizes: Sequence[CallSize]
) -> Int32[Array, "n"]:
    """Returns the place of the first call with that many tokens and drafts of one row, [n]."""
    known = jnp.asarray(sizes, jnp.int32)
    fits = (known[:, 0] >= tokens[:, None]) & (known[:, 1] >= drafts[:, None])
    return jnp.argmax(fits, axis=1).astype(jnp.int32)


def grant(demand: Demand, sizes: Sequence[CallSize]) -> RowCounts:
    """Returns how many drafts each row gets, [b], at most what it wants; see `call_sizes`."""
    control, _, kind, wanted, is_running, is_free = demand
    is_shared = is_running & is_free & ~control.is_forced(kind)
    # In the call in any case: a token of each row, and the drafts of rows that do not share.
    fixed = jnp.where(is_running & ~is_shared, wanted, 0)
    kept = control.kept_probs(kind)
    is_fixed = jnp.arange(kept.shape[1]) < fixed[:, None]
    num_rows = is_running.sum()
    used, widest = num_rows + fixed.sum(), fixed.max()
    certain = num_rows.astype(jnp.float32) + jnp.where(is_fixed, kept, 0.0).sum()
    asked = jnp.where(is_shared, wanted, 0)
    granted, tokens = [jnp.zeros_like(wanted)], [certain]
    for size in sizes:
        numbers, gained = _most_likely(kept, jnp.minimum(asked, size.drafts), size.tokens - used)
        granted.append(numbers)
        tokens.append(certain + gained)
    numbers = jnp.stack(granted)
    drafts = jnp.maximum(numbers.max(axis=1), widest)
    places = smallest_call(used + numbers.sum(axis=1), drafts, sizes)
    seconds = _seconds(demand, sizes)
    seconds = jnp.where(drafts > 0, seconds[places + 1], seconds[0])
    seconds = seconds * jnp.where(numbers.any(axis=1), MARGIN, 1.0)
    best = jnp.argmax(jnp.stack(tokens) / seconds)
    return jnp.where(is_shared, jnp.take(numbers, best, axis=0), wanted)


def _most_likely(
    kept: Float32[Array, "b w"], asked: RowCounts, number: Int32[Array, ""]
) -> tuple[RowCounts, Float32[Array, ""]]:
    """Returns how many of the drafts asked for are among the likeliest, and how many are kept."""
    is_asked = jnp.arange(kept.shape[1]) < asked[:, None]
    # By place first, so that of equal ones the earlier goes first; then by row.
    gains = jnp.where(is_asked, kept, -1.0).T.reshape(-1)
    order = jnp.argsort(-gains, stable=True)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)), unique_indices=True)
    is_granted = is_asked & (number > rank.reshape(kept.shape[::-1]).T)
    gained = jnp.where(is_granted, kept, 0.0).sum()
    return is_granted.sum(axis=1, dtype=jnp.int32), gained


def _seconds(demand: Demand, sizes: Sequence[CallSize]) -> Float32[Array, "n"]:
    """Returns the running rows' mean cost of a plain round and of rounds of the calls."""
    control, costs, kind, is_running = demand.control, demand.costs, demand.kind, demand.is_running
    batch_size = kind.shape[0]
    known = costs[jnp.arange(batch_size), control.drafter_of(kind)]
    # A row that may not draft says nothing of what drafts cost the others.
    counts = is_running & (known < FORBIDDEN).all(axis=1)
    counts = jnp.where(counts.any(), counts, True)
    weights = counts.astype(jnp.float32)[:, None]
    mean = jnp.sum(jnp.where(counts[:, None], known, 0.0), axis=0) / weights.sum()
    tokens = jnp.asarray([batch_size, *(size.tokens for size in sizes)], jnp.float32)
    return jnp.interp(tokens / batch_size - 1, jnp.asarray(control.numbers, jnp.float32), mean)

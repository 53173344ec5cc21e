"""A row that leaves its batch: for good, or to go on later, once its text was read anew."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jspec.models.paged_cache import caches_in, map_caches
from jspec.speculation.kinds import drafters_of
from jspec.speculation.prefill import insert
from jspec.speculation.types import SpecState


def emptied(
    put: Callable[..., SpecState], state: SpecState, row: int, nothing: SpecState
) -> SpecState:
    """Returns the state with an empty row in the place of an ended one, put there by `insert`.

    What the answer asked for would go on to cost the others. The drafter's state stays, as it is
    the largest part, and nobody asks for the row's drafts.
    """
    draft = state.draft
    state = put(state.replace(draft=None), row, nothing.replace(draft=None))
    return state.replace(draft=draft)


def take_row(state: SpecState, row: Int32[Array, ""]) -> SpecState:
    """Returns one row's state."""
    take = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=row, slice_size=1)
    return jax.tree.map(take, state)


def run_alone(
    state: SpecState, row: Int32[Array, ""], read: SpecState, saved: SpecState
) -> SpecState:
    """Returns the state with one row running, which has read its text and surely drafts."""
    control = saved.control
    if control is not None:
        # Who has nothing to read is not asked, and leaves the round to a model, which has the text.
        names = drafters_of(control.kinds)
        reading = control.reading[
            :, jnp.array([names.index(kind.drafter) for kind in control.kinds])
        ]
        control = control.replace(forced=jnp.where(reading > 0, control.numbers[-1], 0))
    own = read.replace(last_token=saved.last_token, control=control)
    state = insert(state, row, own)
    return state.replace(is_done=jnp.arange(len(state.is_done)) != row)


def settle(saved: SpecState, after: SpecState, row: Int32[Array, ""]) -> SpecState:
    """Returns what was saved; what its drafter has not read again is missing from its caches."""
    lengths = iter([cache.length[row] for cache in caches_in(after.draft)])

    def cut(cache: Any) -> Any:
        return cache.rollback(jnp.minimum(cache.length, next(lengths)))

    return saved.replace(draft=map_caches(cut, saved.draft))

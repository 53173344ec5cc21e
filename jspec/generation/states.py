"""The state of a batch on the device: empty rows, and what a request puts into its row."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.generation.request import Settings
from jspec.generation.rows import MAX_STOP_IDS, Row
from jspec.models import KVCache
from jspec.sampling.distribution import SamplingSettings
from jspec.sampling.settings import Switches
from jspec.speculation.control import Control
from jspec.speculation.ends import silence
from jspec.speculation.logprobs import TokenLogprobs
from jspec.speculation.types import Drafter, SpecState

_NO_REQUEST = Row(Settings(), prompt=(), stop_ids=(), max_length=0)


def empty_state(
    *,
    batch_size: int,
    capacity: int,
    switches: Switches,
    init_cache: Callable[[int, int], KVCache],
    drafter: Drafter | None,
    vocab_size: int,
    numbers: Sequence[int],
) -> SpecState:
    """Returns a state whose rows are all done.

    Args:
      batch_size: number of rows.
      capacity: slots of each row's cache.
      switches: the processors and filters that the rows can use.
      init_cache: (batch size, capacity) -> the target's empty cache.
      drafter: the drafter; None for plain decoding.
      vocab_size: size of the target's distributions.
      numbers: numbers of drafts among which each row chooses; empty if the number is fixed.
    """
    zeros = jnp.zeros([batch_size], jnp.int32)
    ones = jnp.ones([batch_size], jnp.float32)
    states = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (batch_size, *leaf.shape)),
        _processor_states(_NO_REQUEST, switches, vocab_size),
    )
    control = None
    if drafter is not None and numbers:
        control = Control.init(batch_size, kinds=drafter.kinds, numbers=numbers)
    return SpecState(
        target_cache=init_cache(batch_size, capacity),
        draft=None if drafter is None else drafter.init(batch_size, capacity),
        last_token=zeros,
        seed=zeros.astype(jnp.uint32),
        settings=SamplingSettings(0 * ones, zeros, ones, 0 * ones, states, switches),
        draft_temperature=0 * ones,
        stop_ids=jnp.full([batch_size, MAX_STOP_IDS], -1, jnp.int32),
        max_length=zeros,
        is_done=jnp.ones([batch_size], bool),
        control=control,
        last_logprobs=TokenLogprobs(ones[:, None], ones[:, None]) if switches.logprobs else None,
    )


def with_request(state: SpecState, row: Row, switches: Switches, vocab_size: int) -> SpecState:
    """Returns an empty one-row state with everything that the request decides.

    Args:
      state: an empty state of one row.
      row: the request.
      switches: the processors and filters of the state.
      vocab_size: size of the target's distributions.
    """
    settings = row.settings
    stop_ids = sorted(set(row.stop_ids))
    stop_ids += [-1] * (MAX_STOP_IDS - len(stop_ids))
    draft_temperature = settings.draft_temperature
    if draft_temperature is None:
        draft_temperature = settings.temperature
    states = _processor_states(row, switches, vocab_size)
    control = state.control
    if control is not None and row.costs is not None:
        rounds, reading = (jnp.asarray(leaf, jnp.float32)[None] for leaf in row.costs)
        control = control.replace(costs=rounds, reading=reading)
    return state.replace(
        seed=np.array([settings.seed], np.uint32),
        settings=SamplingSettings(
            temperature=jnp.array([settings.temperature], np.float32),
            top_k=jnp.array([settings.top_k], np.int32),
            top_p=jnp.array([settings.top_p], np.float32),
            min_p=jnp.array([settings.min_p], np.float32),
            states=jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], states),
            switches=switches,
        ),
        draft_temperature=jnp.array([draft_temperature], np.float32),
        stop_ids=np.array([stop_ids], np.int32),
        max_length=np.array([row.max_length], np.int32),
        is_done=np.array([False]),
        control=control,
    )


def finish_row(state: SpecState, row: jax.Array) -> SpecState:
    """Returns the state with one row marked as done; the row neither writes nor emits after that.

    Args:
      state: the state of the batch.
      row: index of the row, a scalar.
    """
    return silence(state, state.is_done.at[row].set(True))


def _processor_states(row: Row, switches: Switches, vocab_size: int) -> tuple[Any, ...]:
    """Returns the state of each processor for one row, without the row's axis."""
    return tuple(
        processor.init(
            row.settings,
            prompt=list(row.prompt),
            stop_ids=list(row.stop_ids),
            vocab_size=vocab_size,
        )
        for processor in switches.processors
    )

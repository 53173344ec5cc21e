"""The compiled programs of one target and one drafter: where jit begins and ends."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models import KVCache, init_cache, make_apply
from jspec.request import Settings
from jspec.sampling import Filters, SamplingSettings
from jspec.speculation.acceptance import get_rule
from jspec.speculation.loop import StepFn, run_rounds
from jspec.speculation.plain import plain_step
from jspec.speculation.prefill import insert, prefill_chunk
from jspec.speculation.step import speculative_step
from jspec.speculation.types import Drafter, ModelParams, SpecState, StepInfo
from jspec.typing import ApplyFn
from jspec.vocabulary import mask_padding
from jspec.weights.resolver import LoadedModel

MAX_ROUNDS_PER_VISIT = 16
_PREFILL_WIDTH = 64
MAX_STOP_IDS = 8


class Row(NamedTuple):
    """A request in the form that the device wants.

    Attributes:
      settings: the user's.
      stop_ids: every token that ends it, at most MAX_STOP_IDS.
      max_length: tokens it may come to, prompt included.
    """

    settings: Settings
    stop_ids: Sequence[int]
    max_length: int


class Engine:
    """The programs: an empty state, one chunk of prefill, a row's insertion and end, many rounds.

    A state that goes in is donated: the cache is written in place. Prompts, seeds, temperatures and
    limits are data. What compiles anew is another capacity, batch size or set of filters.
    """

    def __init__(
        self,
        *,
        target: ApplyFn,
        init_cache: Callable[[int, int], KVCache],
        drafter: Drafter | None,
        step: StepFn,
        prefill_width: int,
    ) -> None:
        self._init_cache = init_cache
        self._drafter = drafter
        self._prefill_width = prefill_width
        self._empty = jax.jit(
            self._empty_state, static_argnames=("batch_size", "capacity", "filters")
        )
        self._prefill = jax.jit(
            functools.partial(prefill_chunk, target=target, drafter=drafter), donate_argnums=1
        )
        self._insert = jax.jit(insert, donate_argnums=0)
        self._run = jax.jit(
            functools.partial(run_rounds, step=step, max_rounds=MAX_ROUNDS_PER_VISIT),
            donate_argnums=1,
        )
        self._finish = jax.jit(_finish_row, donate_argnums=0)

    def empty_state(self, batch_size: int, capacity: int, filters: Filters) -> SpecState:
        """Returns a state of rows that are all done, with room for `capacity` tokens each."""
        return self._empty(batch_size=batch_size, capacity=capacity, filters=filters)

    def prefill(
        self,
        params: ModelParams,
        row: Row,
        token_ids: Sequence[int],
        capacity: int,
        filters: Filters,
    ) -> SpecState:
        """Returns a state of one row that has consumed the prompt and drawn its first token."""
        state = self.empty_state(1, capacity, filters)
        state = state.replace(**_row_leaves(row, filters))
        for begin in range(0, len(token_ids), self._prefill_width):
            chunk = token_ids[begin : begin + self._prefill_width]
            tokens = np.zeros([1, self._prefill_width], np.int32)
            tokens[0, : len(chunk)] = chunk
            state = self._prefill(params, state, tokens, np.array([len(chunk)], np.int32))
        return state

    def insert(self, state: SpecState, row: int, prefilled: SpecState) -> SpecState:
        """Puts a prefilled row in the place of row `row`."""
        return self._insert(state, np.int32(row), prefilled)

    def run(
        self, params: ModelParams, state: SpecState, num_rounds: int
    ) -> tuple[SpecState, StepInfo]:
        """Runs rounds; returns the state and the infos of those that were run, on the host."""
        state, infos, count = self._run(params, state, np.int32(num_rounds))
        infos, count = jax.device_get((infos, count))
        return state, jax.tree.map(lambda leaf: leaf[:count], infos)

    def finish(self, state: SpecState, row: int) -> SpecState:
        """Marks a row as done, for an end that only the host can see."""
        return self._finish(state, np.int32(row))

    def _empty_state(self, *, batch_size: int, capacity: int, filters: Filters) -> SpecState:
        zeros = jnp.zeros([batch_size], jnp.int32)
        ones = jnp.ones([batch_size], jnp.float32)
        settings = SamplingSettings(0 * ones, zeros, ones, 0 * ones, filters)
        return SpecState(
            target_cache=self._init_cache(batch_size, capacity),
            draft=None if self._drafter is None else self._drafter.init(batch_size, capacity),
            last_token=zeros,
            seed=zeros.astype(jnp.uint32),
            settings=settings,
            draft_settings=settings,
            stop_ids=jnp.full([batch_size, MAX_STOP_IDS], -1, jnp.int32),
            max_length=zeros,
            is_done=jnp.ones([batch_size], bool),
        )


def make_engine(target: LoadedModel, drafter: Drafter | None, acceptance: str) -> Engine:
    """Returns the programs for a target, a drafter (None decodes plainly) and an acceptance rule.

    Raises:
      InputError: no such rule.
    """
    apply = mask_padding(make_apply(target.config), target)
    rule = get_rule(acceptance)
    if drafter is None:
        step = functools.partial(plain_step, target=apply)
    else:
        step = functools.partial(speculative_step, target=apply, drafter=drafter, rule=rule)

    def empty_cache(batch_size: int, capacity: int) -> KVCache:
        dtype = target.params["embedding"].dtype
        return init_cache(target.config, batch_size=batch_size, capacity=capacity, dtype=dtype)

    return Engine(
        target=apply,
        init_cache=empty_cache,
        drafter=drafter,
        step=step,
        prefill_width=_PREFILL_WIDTH,
    )


def _finish_row(state: SpecState, row: jax.Array) -> SpecState:
    return state.replace(is_done=state.is_done.at[row].set(True))


def _row_leaves(row: Row, filters: Filters) -> dict[str, object]:
    """Returns the leaves of a one-row state that the request decides."""
    settings = row.settings
    stop_ids = sorted(set(row.stop_ids))
    stop_ids += [-1] * (MAX_STOP_IDS - len(stop_ids))
    draft_temperature = settings.draft_temperature
    if draft_temperature is None:
        draft_temperature = settings.temperature

    def sampling(temperature: float) -> SamplingSettings:
        return SamplingSettings(
            temperature=jnp.array([temperature], np.float32),
            top_k=jnp.array([settings.top_k], np.int32),
            top_p=jnp.array([settings.top_p], np.float32),
            min_p=jnp.array([settings.min_p], np.float32),
            filters=filters,
        )

    return {
        "seed": np.array([settings.seed], np.uint32),
        "settings": sampling(settings.temperature),
        "draft_settings": sampling(draft_temperature),
        "stop_ids": np.array([stop_ids], np.int32),
        "max_length": np.array([row.max_length], np.int32),
        "is_done": np.array([False]),
    }

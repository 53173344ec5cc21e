"""The compiled programs of one target and one drafter: where jit begins and ends."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec import kernels
from jspec.common.memory import tree_bytes
from jspec.common.typing import ApplyFn
from jspec.generation.request import Settings
from jspec.models import KVCache, init_cache, make_apply
from jspec.sampling.settings import SamplingSettings, Switches
from jspec.speculation.acceptance.types import AcceptanceRule
from jspec.speculation.control import Control
from jspec.speculation.ends import silence
from jspec.speculation.logprobs import TokenLogprobs
from jspec.speculation.loop import StepFn, run_rounds
from jspec.speculation.plain import plain_step
from jspec.speculation.prefill import insert, prefill_chunk
from jspec.speculation.step import speculative_step
from jspec.speculation.types import Drafter, ModelParams, SpecState, StepInfo
from jspec.weights.resolver import LoadedModel
from jspec.weights.vocabulary import mask_padding

MAX_ROUNDS_PER_VISIT = 16
NARROW_PROMPT = 2 * kernels.NARROW_CHUNK  # tokens of a prompt up to which no chunk is wide
MAX_STOP_IDS = 8
_SHAPE = "batch_size", "capacity", "switches"  # of a state


class CostsAt(NamedTuple):
    """What rounds cost a row; see `Control`.

    Attributes:
      rounds: seconds of a round, by drafter and number of drafts, [m c].
      reading: seconds for each token that a drafter has missed, [m].
    """

    rounds: np.ndarray
    reading: np.ndarray


class Row(NamedTuple):
    """A request in the form that the device wants.

    Attributes:
      settings: the user's.
      prompt: token ids.
      stop_ids: every token that ends it, at most MAX_STOP_IDS.
      max_length: tokens it may come to, prompt included.
      costs: of its rounds; None where the number of drafts is fixed.
    """

    settings: Settings
    prompt: Sequence[int]
    stop_ids: Sequence[int]
    max_length: int
    costs: CostsAt | None = None


class Engine:
    """The programs: an empty state, one chunk of prefill, a row's insertion and end, many rounds.

    A state that goes in is donated: the cache is written in place. Prompts, seeds, temperatures and
    limits are data. What compiles anew is another capacity, batch size or set of switches.
    """

    def __init__(
        self,
        *,
        target: ApplyFn,
        init_cache: Callable[[int, int], KVCache],
        drafter: Drafter | None,
        step: StepFn,
        vocab_size: int,
        prefill_widths: Sequence[int],
        numbers: Sequence[int] = (),
    ) -> None:
        """Prepares the programs; nothing is compiled yet.

        Args:
          target: the target's ApplyFn.
          init_cache: (batch size, capacity) -> its empty cache.
          drafter: None decodes plainly.
          step: one round.
          vocab_size: of the target's distributions.
          prefill_widths: of a prompt's chunks: one, or a narrow and a wide one.
          numbers: of drafts, among which each row chooses; none if the number is fixed.
        """
        self._numbers = numbers
        self._prefill_widths = prefill_widths
        self._init_cache = init_cache
        self._vocab_size = vocab_size
        self._drafter = drafter
        self._empty = jax.jit(self._empty_state, static_argnames=_SHAPE)
        self._state_bytes: dict[tuple[int, int, Switches], int] = {}
        self._prefill = jax.jit(
            functools.partial(prefill_chunk, target=target, drafter=drafter), donate_argnums=1
        )
        self._insert = jax.jit(insert, donate_argnums=0)
        self._run = jax.jit(
            functools.partial(run_rounds, step=step, max_rounds=MAX_ROUNDS_PER_VISIT),
            donate_argnums=1,
        )
        self._finish = jax.jit(_finish_row, donate_argnums=0)

    def empty_state(self, batch_size: int, capacity: int, switches: Switches) -> SpecState:
        """Returns a state of rows that are all done, with room for `capacity` tokens each."""
        return self._empty(batch_size=batch_size, capacity=capacity, switches=switches)

    def state_bytes(self, batch_size: int, capacity: int, switches: Switches) -> int:
        """Returns the memory of such a state."""
        shape = batch_size, capacity, switches
        if shape not in self._state_bytes:  # tracing takes as long as a round
            empty = functools.partial(self._empty_state, **dict(zip(_SHAPE, shape, strict=True)))
            self._state_bytes[shape] = tree_bytes(jax.eval_shape(empty))
        return self._state_bytes[shape]

    def prefill(
        self, params: ModelParams, row: Row, capacity: int, switches: Switches
    ) -> SpecState:
        """Returns a state of one row that has consumed the prompt and drawn its first token."""
        state = self.empty_state(1, capacity, switches)
        state = state.replace(**_row_leaves(row, switches, self._vocab_size))
        if state.control is not None and row.costs is not None:
            rounds, reading = (jnp.asarray(leaf, jnp.float32)[None] for leaf in row.costs)
            state = state.replace(control=state.control.replace(costs=rounds, reading=reading))
        begin = 0
        while begin < len(row.prompt):
            width = self._chunk_width(len(row.prompt) - begin)
            chunk = row.prompt[begin : begin + width]
            tokens = np.zeros([1, width], np.int32)
            tokens[0, : len(chunk)] = chunk
            state = self._prefill(params, state, tokens, np.array([len(chunk)], np.int32))
            begin += width
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

    def _chunk_width(self, num_left: int) -> int:
        """Returns the width of the next chunk of a prompt of which so many tokens are left."""
        narrow, wide = self._prefill_widths[0], self._prefill_widths[-1]
        return wide if num_left > NARROW_PROMPT else narrow

    def _empty_state(self, *, batch_size: int, capacity: int, switches: Switches) -> SpecState:
        zeros = jnp.zeros([batch_size], jnp.int32)
        ones = jnp.ones([batch_size], jnp.float32)
        row = Row(Settings(), prompt=(), stop_ids=(), max_length=0)
        states = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (batch_size, *leaf.shape)),
            _processor_states(row, switches, self._vocab_size),
        )
        settings = SamplingSettings(0 * ones, zeros, ones, 0 * ones, states, switches)
        return SpecState(
            target_cache=self._init_cache(batch_size, capacity),
            draft=None if self._drafter is None else self._drafter.init(batch_size, capacity),
            last_token=zeros,
            seed=zeros.astype(jnp.uint32),
            settings=settings,
            draft_temperature=0 * ones,
            stop_ids=jnp.full([batch_size, MAX_STOP_IDS], -1, jnp.int32),
            max_length=zeros,
            is_done=jnp.ones([batch_size], bool),
            control=self._empty_control(batch_size),
            last_logprobs=(
                TokenLogprobs(ones[:, None], ones[:, None]) if switches.logprobs else None
            ),
        )

    def _empty_control(self, batch_size: int) -> Control | None:
        if self._drafter is None or not self._numbers:
            return None
        return Control.init(batch_size, kinds=self._drafter.kinds, numbers=self._numbers)


def make_engine(
    target: LoadedModel,
    drafter: Drafter | None,
    rule: AcceptanceRule,
    numbers: Sequence[int] = (),
) -> Engine:
    """Returns the programs.

    Args:
      target: the target.
      drafter: None decodes plainly.
      rule: what decides.
      numbers: of drafts, among which each row chooses, rising from 0; none if it is fixed.
    """
    apply = mask_padding(make_apply(target.config), target)
    if drafter is None:
        step = functools.partial(plain_step, target=apply)
    else:
        widths = verify_widths(drafter, numbers)
        step = functools.partial(
            speculative_step, target=apply, drafter=drafter, rule=rule, widths=widths
        )

    def empty_cache(batch_size: int, capacity: int) -> KVCache:
        dtype = target.params["embedding"].dtype
        return init_cache(target.config, batch_size=batch_size, capacity=capacity, dtype=dtype)

    return Engine(
        target=apply,
        init_cache=empty_cache,
        drafter=drafter,
        step=step,
        vocab_size=target.config.vocab_size,
        prefill_widths=kernels.prefill_widths(target.params["embedding"]),
        numbers=numbers,
    )


def verify_widths(drafter: Drafter, numbers: Sequence[int]) -> Sequence[int]:
    """Returns the widths at which a verify call is compiled besides that of a full proposal.

    Args:
      drafter: what proposes.
      numbers: of drafts, among which each row chooses; none if it is fixed.
    """
    return numbers or ((0,) if drafter.may_be_silent else ())


def _finish_row(state: SpecState, row: jax.Array) -> SpecState:
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


def _row_leaves(row: Row, switches: Switches, vocab_size: int) -> dict[str, object]:
    """Returns the leaves of a one-row state that the request decides."""
    settings = row.settings
    stop_ids = sorted(set(row.stop_ids))
    stop_ids += [-1] * (MAX_STOP_IDS - len(stop_ids))
    draft_temperature = settings.draft_temperature
    if draft_temperature is None:
        draft_temperature = settings.temperature
    states = _processor_states(row, switches, vocab_size)
    return {
        "seed": np.array([settings.seed], np.uint32),
        "settings": SamplingSettings(
            temperature=jnp.array([settings.temperature], np.float32),
            top_k=jnp.array([settings.top_k], np.int32),
            top_p=jnp.array([settings.top_p], np.float32),
            min_p=jnp.array([settings.min_p], np.float32),
            states=jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], states),
            switches=switches,
        ),
        "draft_temperature": jnp.array([draft_temperature], np.float32),
        "stop_ids": np.array([stop_ids], np.int32),
        "max_length": np.array([row.max_length], np.int32),
        "is_done": np.array([False]),
    }

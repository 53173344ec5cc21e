"""The compiled programs of one target and one drafter: where jit begins and ends."""

import functools
from collections.abc import Sequence

import jax
import numpy as np

from jspec import kernels
from jspec.common.memory import tree_bytes
from jspec.generation.rows import Row
from jspec.generation.states import empty_state, finish_row, with_request
from jspec.models import KVCache, init_cache, make_apply
from jspec.sampling.settings import Switches
from jspec.speculation.acceptance.types import AcceptanceRule
from jspec.speculation.loop import run_rounds
from jspec.speculation.plain import plain_step
from jspec.speculation.prefill import insert, prefill_chunk
from jspec.speculation.step import speculative_step
from jspec.speculation.types import Drafter, ModelParams, SpecState, StepInfo
from jspec.weights.resolver import LoadedModel
from jspec.weights.vocabulary import mask_padding

MAX_ROUNDS_PER_VISIT = 16
NARROW_PROMPT = (
    2 * kernels.NARROW_CHUNK
)  # the longest prompt, in tokens, that is read in narrow chunks


class Engine:
    """The programs: an empty state, a chunk of prefill, a row's insertion and end, many rounds.

    Prompts, seeds, temperatures and limits are data. A new program is compiled only for another
    capacity, batch size or set of switches.
    """

    def __init__(
        self,
        target: LoadedModel,
        drafter: Drafter | None,
        rule: AcceptanceRule,
        numbers: Sequence[int] = (),
    ) -> None:
        """Prepares the programs; nothing is compiled yet.

        Args:
          target: the target model.
          drafter: the drafter; None for plain decoding.
          rule: the acceptance rule.
          numbers: numbers of drafts among which each row chooses, in increasing order from 0; empty
            if the number is fixed.
        """
        apply = mask_padding(make_apply(target.config), target)
        if drafter is None:
            step = functools.partial(plain_step, target=apply)
        else:
            step = functools.partial(
                speculative_step,
                target=apply,
                drafter=drafter,
                rule=rule,
                widths=verify_widths(drafter, numbers),
            )
        self._vocab_size = target.config.vocab_size
        self._prefill_widths = kernels.prefill_widths(target.params["embedding"])
        self._empty_state = functools.partial(
            empty_state,
            init_cache=functools.partial(_init_cache, target),
            drafter=drafter,
            vocab_size=self._vocab_size,
            numbers=numbers,
        )
        self._state_bytes: dict[tuple[int, int, Switches], int] = {}

        # The jit boundary. The arguments of `_empty` are shapes, and therefore static; nothing else
        # is. Every other program donates the state that it takes, so that the caches, by far the
        # largest arrays after the weights, are written in place. Parameters, and the prefilled row
        # that `_insert` copies from, are not donated: the caller still holds them.
        self._empty = jax.jit(
            self._empty_state, static_argnames=("batch_size", "capacity", "switches")
        )
        self._prefill = jax.jit(
            functools.partial(prefill_chunk, target=apply, drafter=drafter),
            donate_argnums=1,
        )
        self._insert = jax.jit(insert, donate_argnums=0)
        self._run = jax.jit(
            functools.partial(run_rounds, step=step, max_rounds=MAX_ROUNDS_PER_VISIT),
            donate_argnums=1,
        )
        self._finish = jax.jit(finish_row, donate_argnums=0)

    def empty_state(self, batch_size: int, capacity: int, switches: Switches) -> SpecState:
        """Returns a state whose rows are all done, with `capacity` slots each."""
        return self._empty(batch_size=batch_size, capacity=capacity, switches=switches)

    def state_bytes(self, batch_size: int, capacity: int, switches: Switches) -> int:
        """Returns the size of such a state in bytes, without making it."""
        shape = batch_size, capacity, switches
        if shape not in self._state_bytes:  # tracing takes as long as a round
            empty = functools.partial(
                self._empty_state, batch_size=batch_size, capacity=capacity, switches=switches
            )
            self._state_bytes[shape] = tree_bytes(jax.eval_shape(empty))
        return self._state_bytes[shape]

    def prefill(
        self, params: ModelParams, row: Row, capacity: int, switches: Switches
    ) -> SpecState:
        """Returns a state of one row that has read the prompt and drawn its first token.

        Args:
          params: parameters of target and drafter.
          row: the request.
          capacity: slots of the row's cache.
          switches: the processors and filters of the batch.
        """
        state = with_request(
            self.empty_state(1, capacity, switches), row, switches, self._vocab_size
        )
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
        """Returns the state with row number `row` replaced by a prefilled one."""
        return self._insert(state, np.int32(row), prefilled)

    def run(
        self, params: ModelParams, state: SpecState, num_rounds: int
    ) -> tuple[SpecState, StepInfo]:
        """Runs rounds until `num_rounds` are done, or all rows are.

        Args:
          params: parameters of target and drafter.
          state: the state of the batch; it is donated.
          num_rounds: maximum number of rounds, at most `MAX_ROUNDS_PER_VISIT`.

        Returns:
          The next state, on the device, and the infos of the rounds that were run, on the host,
          [rounds b ...].
        """
        state, infos, count = self._run(params, state, np.int32(num_rounds))
        infos, count = jax.device_get((infos, count))
        return state, jax.tree.map(lambda leaf: leaf[:count], infos)

    def finish(self, state: SpecState, row: int) -> SpecState:
        """Returns the state with a row marked as done, for an end that only the host can see."""
        return self._finish(state, np.int32(row))

    def _chunk_width(self, num_left: int) -> int:
        """Returns the width of the next chunk of a prompt with `num_left` tokens to read."""
        narrow, wide = self._prefill_widths[0], self._prefill_widths[-1]
        return wide if num_left > NARROW_PROMPT else narrow


def _init_cache(target: LoadedModel, batch_size: int, capacity: int) -> KVCache:
    dtype = target.params["embedding"].dtype
    return init_cache(target.config, batch_size=batch_size, capacity=capacity, dtype=dtype)


def verify_widths(drafter: Drafter, numbers: Sequence[int]) -> Sequence[int]:
    """Returns the widths, besides a full proposal's, for which a verify call is compiled.

    Args:
      drafter: the drafter.
      numbers: numbers of drafts among which each row chooses; empty if the number is fixed.
    """
    return numbers or ((0,) if drafter.may_be_silent else ())

"""The device's side of the answers in hand: which request is in which row."""

import operator
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jspec.common.compile_clock import Instant
from jspec.common.memory import Room, check_memory
from jspec.generation.answer import Round
from jspec.generation.capacity import capacity_for
from jspec.generation.engine import Engine, Row
from jspec.generation.request import Settings
from jspec.sampling.pipeline import PROCESSORS
from jspec.sampling.processor import Processor
from jspec.sampling.settings import Switches
from jspec.speculation.logprobs import TokenLogprobs
from jspec.speculation.types import ModelParams, SpecState, StepInfo


class Batch:
    """Rows that are filled with requests, run together, and filled anew.

    Attributes:
      places: the rows.
      room: what their caches take.
    """

    def __init__(
        self,
        engine: Engine,
        params: ModelParams,
        rows: Sequence[Row],
        *,
        batch_size: int,
        head_room: int,
        processors: tuple[Processor, ...] = (),
        drafters: Sequence[str] = (),
    ) -> None:
        """Makes room for the longest of the requests; all rows are empty.

        Args:
          engine: the compiled programs.
          params: both sides' parameters.
          rows: every request that will come.
          batch_size: rows at most.
          head_room: tokens of one block, which may stand behind the last token.
          processors: the user's own, which come after jspec's.
          drafters: who makes each kind of proposal.

        Raises:
          InputError: there is not enough memory for it.
        """
        self._engine, self._params, self._rows = engine, params, rows
        self._drafters = drafters
        self._capacity = capacity_for(max(row.max_length for row in rows), head_room)
        self._switches = needed_switches([row.settings for row in rows], processors)
        # In powers of two: another number of requests rarely means another program.
        self.places = range(min(batch_size, 1 << (len(rows) - 1).bit_length()))
        self._infos: StepInfo | None = None
        num_states = 1 if len(self.places) == 1 else len(self.places) + 1
        self.room = Room(
            len(self.places),
            self._capacity,
            engine.state_bytes(num_states, self._capacity, self._switches),
        )
        check_memory(
            {f"caches of {self.room}": self.room.num_bytes},
            "fewer rows (batch_size) or shorter texts (max_new_tokens) take less",
        )
        self._state: SpecState | None = None  # a single row has none until its prompt is read
        if len(self.places) > 1:
            self._state = engine.empty_state(len(self.places), self._capacity, self._switches)

    def fill(self, place: int, index: int) -> Round:
        """Gives a row to request `index`; returns its first token as a round of its own.

        The state of the prompt that was read is put among the others, or is the batch's where that
        has one row: a single stream holds one cache, and copies none.
        """
        if len(self.places) == 1:
            self._state = None  # its memory is free for the next one
        prefilled = self._engine.prefill(
            self._params, self._rows[index], self._capacity, self._switches
        )
        if self._state is None:
            self._state = prefilled
        else:
            self._state = self._engine.insert(self._state, place, prefilled)
        token, logprobs = jax.device_get((prefilled.last_token, prefilled.last_logprobs))
        logprobs = jax.tree.map(operator.itemgetter(0), logprobs)
        return Round(token.tolist(), _logprobs_of(logprobs, 1))

    def run(self, num_rounds: int) -> float:
        """Runs at most so many rounds for every row; returns the seconds they took."""
        begin = Instant()
        assert self._state is not None  # a row was filled
        self._state, self._infos = self._engine.run(self._params, self._state, num_rounds)
        return Instant().run_seconds_since(begin)

    def rounds(self, place: int) -> Iterator[Round]:
        """Yields what the rounds of the last run did for a row."""
        if self._infos is None:
            return
        infos = jax.tree.map(lambda leaf: leaf[:, place], self._infos)
        for index in np.flatnonzero(infos.num_tokens):
            info = jax.tree.map(operator.itemgetter(index), infos)
            yield Round(
                token_ids=info.tokens[: info.num_tokens].tolist(),
                logprobs=_logprobs_of(info.logprobs, info.num_tokens),
                num_proposed=int(info.num_proposed),
                num_accepted=int(info.num_accepted),
                drafter=self._drafters[int(info.kind)] if info.num_proposed else "",
            )

    def finish(self, place: int) -> None:
        """Makes a row silent."""
        assert self._state is not None
        self._state = self._engine.finish(self._state, place)


def _logprobs_of(logprobs: TokenLogprobs | None, count: int) -> list[tuple[float, float]] | None:
    """Returns the first `count` of one row's pairs."""
    if logprobs is None:
        return None
    return list(
        zip(logprobs.raw[:count].tolist(), logprobs.processed[:count].tolist(), strict=True)
    )


def needed_switches(
    settings: Sequence[Settings], processors: tuple[Processor, ...] = ()
) -> Switches:
    """Returns what a program needs to serve requests with those settings."""
    own = tuple(p for p in (*PROCESSORS, *processors) if any(map(p.is_used, settings)))
    return Switches(
        top_k=any(one.top_k > 0 for one in settings),
        top_p=any(one.top_p < 1 for one in settings),
        min_p=any(one.min_p > 0 for one in settings),
        processors=own,
        logprobs=any(one.logprobs for one in settings),
    )

"""The device's side of the answers in hand: which request is in which row."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jspec.engine import Engine, Row
from jspec.sampling import Filters
from jspec.speculation.types import ModelParams, SpecState, StepInfo

_SMALLEST_CAPACITY = 256


class Round(NamedTuple):
    """What one round did for one row.

    Attributes:
      token_ids: emitted.
      num_proposed: drafts put forward.
      num_accepted: drafts kept.
    """

    token_ids: list[int]
    num_proposed: int
    num_accepted: int


class Batch:
    """Rows that are filled with requests, run together, and filled anew.

    Attributes:
      places: the rows.
    """

    def __init__(
        self,
        engine: Engine,
        params: ModelParams,
        rows: Sequence[Row],
        prompts: Sequence[list[int]],
        batch_size: int,
        head_room: int,
    ) -> None:
        """Makes room for the longest of the requests; all rows are empty.

        Args:
          engine: the compiled programs.
          params: both sides' parameters.
          rows: every request that will come.
          prompts: their ids.
          batch_size: rows at most.
          head_room: tokens of one block, which may stand behind the last token.
        """
        self._engine, self._params, self._rows, self._prompts = engine, params, rows, prompts
        self._capacity = _bucket(max(row.max_length for row in rows) + head_room)
        self._filters = Filters(
            top_k=any(row.settings.top_k > 0 for row in rows),
            top_p=any(row.settings.top_p < 1 for row in rows),
            min_p=any(row.settings.min_p > 0 for row in rows),
        )
        # In powers of two: another number of requests rarely means another program.
        self.places = range(min(batch_size, 1 << (len(rows) - 1).bit_length()))
        self._infos: StepInfo | None = None
        self._state: SpecState = engine.empty_state(len(self.places), self._capacity, self._filters)

    def fill(self, place: int, index: int) -> int:
        """Gives a row to request `index`; returns its first token."""
        prefilled = self._engine.prefill(
            self._params, self._rows[index], self._prompts[index], self._capacity, self._filters
        )
        self._state = self._engine.insert(self._state, place, prefilled)
        return int(prefilled.last_token[0])

    def run(self, num_rounds: int) -> None:
        """Runs at most so many rounds for every row."""
        self._state, self._infos = self._engine.run(self._params, self._state, num_rounds)

    def rounds(self, place: int) -> Iterator[Round]:
        """Yields what the rounds of the last run did for a row."""
        infos = self._infos
        if infos is None:
            return
        for tokens, count, proposed, accepted in zip(
            infos.tokens[:, place].tolist(),
            infos.num_tokens[:, place].tolist(),
            infos.num_proposed[:, place].tolist(),
            infos.num_accepted[:, place].tolist(),
            strict=True,
        ):
            if count:
                yield Round(tokens[:count], proposed, accepted)

    def finish(self, place: int) -> None:
        """Makes a row silent."""
        self._state = self._engine.finish(self._state, place)


def _bucket(num_slots: int) -> int:
    """Returns the smallest of a few capacities that is enough: 256, 384, 512, 768, 1024, ..."""
    sizes = (_SMALLEST_CAPACITY * 2**i * part // 2 for i in itertools.count() for part in (2, 3))
    return next(size for size in sizes if size >= num_slots)

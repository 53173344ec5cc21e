"""A batch whose caches lie in pages, so that its rows take memory for the tokens they have."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from jspec.common import processes
from jspec.common.errors import InputError
from jspec.common.memory import available_bytes
from jspec.generation.answer import Round
from jspec.generation.batch import (
    Batch,
    Reading,
    Snapshot,
    Snapshots,
    bare,
    emptied,
    fitted,
    row_counts,
    run_alone,
    settle,
    take_row,
)
from jspec.generation.costs import LONGEST_MEASURED
from jspec.generation.engine import CompileNotice, Engine
from jspec.generation.request import SamplingParams
from jspec.generation.rows import Row
from jspec.kernels import PAGE
from jspec.models.cache import (
    caches_in,
    empty_layers,
    map_caches,
    name_pages,
    page_bytes,
    with_layers,
)
from jspec.models.sharding import DATA_AXIS
from jspec.sampling.settings import COLDEST, Switches
from jspec.speculation.types import ModelParams, SpecState

_SHARE_OF_FREE = 0.9
_PARTS = ("target_cache", "draft")  # of a state: each has pages and a table of its own


class PagedBatch(Batch):
    """Rows that share pages of memory; see `Batch`.

    The pages are numbered from 1 to `num_pages`, once for the target's cache and once for those of
    the drafter. A row may run only with pages for all slots that it may write.

    Attributes:
      num_pages: pages of each of both parts.
      page_bytes: of a page of the target's, and of one of the drafter's.
      block: tokens of a round at most.
      tables: pages of the rows that run in each part, in the order of their slots, int32 [b m]; 0
        for none.
      lengths: committed slots of the rows that run, [b].
    """

    def __init__(
        self,
        engine: Engine,
        params: ModelParams,
        notice: CompileNotice,
        num_rows: int,
        max_length: int,
        switches: Switches,
        cache_bytes: int | None = None,
    ) -> None:
        """Makes empty rows, and pages in `cache_bytes`.

        By default there are pages for all rows at their longest, or as many as there is memory for.

        Raises:
          InputError: if there is not enough memory, or not enough in `cache_bytes` for one row.
        """
        layout, capacity = engine.layout, engine.capacity_for(max_length)
        shape = engine.empty_state.eval_shape(1, capacity, switches)
        caches = [caches_in(getattr(shape, part)) for part in _PARTS]
        shard = layout.own_shapes(shape)  # one device's
        self.page_bytes = tuple(page_bytes(getattr(shard, p)) * layout.num_sharing for p in _PARTS)
        # Drafters that write further than a block have caches with more slots.
        self._spare = [
            max((cache.capacity - capacity for cache in part), default=0) for part in caches
        ]
        self.block = engine.num_draft_tokens + 1
        widths = self.needed(max_length, max_length)
        self.num_pages = self._fitting(num_rows, max(widths), cache_bytes)
        if self.num_pages < max(widths):
            raise InputError(
                f"expected cache_bytes of {max(widths) * sum(self.page_bytes)} at least, for one "
                f"request of {max_length} tokens, got {cache_bytes}"
            )

        def empty_state(count: int) -> SpecState:
            full = engine.empty_state(count, capacity, switches)
            if full.control is not None:
                measured = layout.own_rows(num_rows)  # a device counts its own rows
                full = full.replace(control=full.control.replace(num_rows=measured))
            return full.replace(**{
                part: bare(getattr(full, part), jnp.zeros([count, width], jnp.int32))
                for part, width in zip(_PARTS, widths, strict=True)
            })  # fmt: skip

        self._empty = jax.jit(empty_state, static_argnums=0)
        super().__init__(engine, params, notice, num_rows, max_length, switches)
        self.max_length = max_length  # the tables have no more pages
        longest = min(LONGEST_MEASURED, max_length)
        self._num_measured = max(self.needed(longest, longest))
        self.num_apart = min(num_rows, self.num_pages // self._num_measured)
        self._nothing = self._empty(1)
        self._layers = [empty_layers(part, self.num_pages, layout.empty_pages) for part in caches]
        self.tables = [np.zeros([num_rows, width], np.int32) for width in widths]
        self.lengths = np.zeros([num_rows], np.int32)
        self._snapshots = Snapshots(engine, params, capacity, switches)
        # The jit boundary; what goes on to exist beside the results is not donated.
        self._save, self._alone, self._settle = map(jax.jit, (take_row, run_alone, settle))
        self._counts = row_counts(num_rows) if layout.mesh is None else (num_rows,)

    def _fitting(self, num_rows: int, longest: int, cache_bytes: int | None) -> int:
        """Returns the number of pages, `longest` of which are a row's at most."""
        size = sum(self.page_bytes)
        if cache_bytes is not None:
            return cache_bytes // size
        free = available_bytes()
        fitting = num_rows * longest if free is None else int(_SHARE_OF_FREE * free) // size
        return processes.least(max(longest, min(num_rows * longest, fitting)))

    def needed(self, length: int, max_length: int, num_rounds: int = 1) -> list[int]:
        """Returns the pages of each part that a row may write in rounds, up to its end."""
        end = min(length + num_rounds * self.block, max_length + self.block)
        pages = [-(-(end + spare) // PAGE) for spare in self._spare]
        return [n if size else 0 for n, size in zip(pages, self.page_bytes, strict=True)]

    def _empty_state(self, num_rows: int) -> SpecState:
        return self._empty(num_rows)

    def _needs(self, capacity: int) -> tuple[int, int]:
        """Returns the bytes of states and pages, and of what programs need beside them."""
        num_states = len(self.rows) + (len(self.rows) > 1)  # a prompt that is being read has one
        size = self.engine.layout.num_bytes(self._empty.eval_shape(num_states))
        size += (self.num_pages + 1) * sum(self.page_bytes)
        return size, self.engine.temporary_bytes(num_states, capacity)

    def _advise(self) -> str:
        return "fewer rows (batch_size), or less memory for pages (cache_bytes)"

    def warm_up(self, widest: int) -> None:
        """Compiles what is needed for snapshots of chunks that are not wider, and saved rows."""
        state = self._empty(1)
        widths = {width for _, width in self.chunks(self._capacity - 1, widest)}
        for width in sorted(width for width in widths if width % PAGE == 0):
            snapshot = self._snapshots.copy(state, 0, width)
            state = self._snapshots.put(state, snapshot, 0)
        self._snapshots.copy_row(state, 0, 0, PAGE)
        for count in self._counts if len(self.rows) > 1 else ():
            # Into a page that nobody has yet.
            reading = self.begin_in(
                Row(SamplingParams(), [0], (), 2), [[1]] * len(_PARTS), widest, ()
            )
            self.read(reading)
            self.insert_saved(count - 1, reading, self.save(0))
            self.snapshot_of(0, 0, PAGE)
            self.run(0)
            self.finish(count - 1)

    def _fit(self, row: int = 0) -> None:
        """Gives the state no more rows than those that have pages, and `row`, need."""
        if self._state is not None and len(self.rows) > 1:
            last = int(np.flatnonzero(self.tables[0].any(axis=1)).max(initial=row))
            self._state = fitted(self._state, last + 1, self._counts, self._empty)

    def chunks(self, num_tokens: int, widest: int) -> list[tuple[int, int]]:
        """Returns the calls that read a prompt: each call's first token, and its width."""
        return self.engine.chunks(num_tokens, widest=widest)

    def begin_in(
        self,
        request: Row,
        pages: Sequence[Sequence[int]],
        widest: int,
        snapshots: Sequence[Snapshot],
        is_scored: bool = False,
        *,
        calls: Sequence[tuple[int, int]] = (),
        draft_length: int = 0,
    ) -> Reading:
        """Begins to read a prompt into pages, after the chunks that have snapshots.

        See `Engine.chunks` for `widest`, which says what is read in which `calls`, unless these are
        given. The pages are those of each part. `draft_length` says how many slots in them the
        drafter's caches have already.
        """
        state = self.engine.put_request(self._empty(1), request)
        calls = calls or self.chunks(len(request.prompt), widest)
        reading = Reading(self.engine, self.params, request.prompt, state, calls, is_scored)
        reading.put(self._snapshots, snapshots)
        if snapshots:
            self._set_draft_length(reading, draft_length)
        self._tables = [np.zeros([1, table.shape[1]], np.int32) for table in self.tables]
        name_pages(self._tables, 0, pages)
        return reading

    def set_pages(self, row: int, pages: Sequence[Sequence[int]]) -> None:
        """Says which pages of each part a row has from now on, in the order of its slots."""
        name_pages(self.tables, row, pages)

    def read(self, reading: Reading) -> int:
        """Reads the next chunk; returns its number of tokens."""
        reading.state = self._join(reading.state, self._tables)
        num_tokens = super().read(reading)
        reading.state = self._part(reading.state)
        return num_tokens

    def snapshot(self, reading: Reading, begin: int, width: int) -> Snapshot:
        """Returns the snapshot of a chunk, which was read last and must be full."""
        return self._snapshots.copy(reading.state, begin, width)

    def _set_draft_length(self, reading: Reading, length: int) -> None:
        """Says how many slots the drafter's caches have, whatever snapshots told of others."""

        def cut(cache: Any) -> Any:
            # Put on the device, each its own, and not made there: that would compile.
            num_slots = jax.device_put(np.array([length], np.int32))
            return cache.rollback(self.engine.layout.place(num_slots))

        reading.state = reading.state.replace(draft=map_caches(cut, reading.state.draft))

    @property
    def keeps_answers(self) -> bool:
        """Whether a row that has answered can leave pages and snapshots to later texts.

        See `Drafter.can_roll_back`; and on a mesh, what an answer adds to pages is known to its own
        row of the mesh alone, see `rows.page_spec`.
        """
        drafter, shape = self.engine.drafter, self.engine.layout.shape or {}
        is_everywhere = shape.get(DATA_AXIS, 1) == 1
        return is_everywhere and (drafter is None or drafter.can_roll_back)

    def shares_drafter_pages(self, request: Row | None = None) -> bool:
        """Returns whether the drafter's pages may be given to later texts, or to this request.

        What is left to read is among the costs by which a row chooses its numbers of drafts: where
        its tokens depend on these, it must find what it would find alone.
        """
        engine = self.engine
        if engine.drafter is None or not self.page_bytes[1] or not self.keeps_answers:
            return False
        if not engine.drafter.has_slot_per_token:
            return False
        if request is None or not engine.numbers or engine.is_coupled:
            return True
        return engine.is_lossless and request.settings.temperature < COLDEST

    def draft_length(self, row: int) -> int:
        """Returns how many slots all of the drafter's caches have in a row."""
        assert self._state is not None
        lengths = jax.device_get([cache.length for cache in caches_in(self._state.draft)])
        return min(int(length[row]) for length in lengths)

    def snapshot_of(self, row: int, begin: int, width: int) -> Snapshot:
        """Returns the snapshot of a chunk of a row's committed text; see `keeps_answers`."""
        assert self._state is not None
        return self._snapshots.copy_row(self._state, row, begin, width)

    def fill(self, row: int, request: Row) -> Round:
        """Reads a short request's prompt into a row; to measure, before there are other requests.

        Of rows beyond `num_apart` several have the same pages, and must have the same request.
        """
        begin = 1 + row % self.num_apart * self._num_measured
        needed = self.needed(request.max_length, request.max_length)
        reading = self.begin_in(request, [range(begin, begin + n) for n in needed], PAGE, ())
        while not reading.is_done:
            self.read(reading)
        return self.insert(row, reading)

    def joined_state(self) -> SpecState:
        """Returns a state of empty rows with the pages."""
        return self._join(self._empty(len(self.rows)), self.tables)

    def insert(self, row: int, reading: Reading) -> Round:
        """Puts a request whose prompt was read into a row; returns the answer's first token."""
        self._fill(row, reading)
        return super().insert(row, reading)

    def insert_saved(self, row: int, reading: Reading, saved: SpecState) -> None:
        """Goes on in a row with what was saved; all its tokens but the newest were read."""
        self._fill(row, reading)
        assert self._state is not None
        if self.page_bytes[1]:
            # The drafter reads the text too, in a round that nobody hears of: were it left to read
            # later, this would count among the costs by which the row chooses.
            alone = self._alone(self._state, row, reading.state, saved)
            is_row = np.arange(len(self._state.last_token))[:, None] == row
            tables = [np.where(is_row, table[: len(is_row)], 0) for table in self.tables]
            after, _ = self.engine.run(self.params, self._join(alone, tables), 1)
            saved = self._settle(saved, self._part(after), row)
        self._state = self.engine.insert(self._state, row, saved)

    def save(self, row: int) -> SpecState:
        """Returns a row's state, all but keys and values."""
        assert self._state is not None
        return self._save(self._state, row)

    def _fill(self, row: int, reading: Reading) -> None:
        self.set_pages(row, [table[0] for table in self._tables])
        self.lengths[row] = len(reading.prompt)
        self._fit(row)

    def run(self, num_rounds: int) -> float:
        """Runs at most `num_rounds` rounds of every row; returns the seconds that they took."""
        self._join_all()
        seconds = super().run(num_rounds)
        assert self._infos is not None
        self.state = self._part(self.state)
        num_tokens = self._infos.num_tokens.sum(axis=0, dtype=np.int32)
        self.lengths[: len(num_tokens)] += num_tokens
        return seconds

    def change(self, do: Callable[[ModelParams, SpecState], SpecState]) -> None:
        """Replaces the state and all pages; see `Batch.change`."""
        self._join_all()
        super().change(do)
        self.state = self._part(self.state)

    def _join_all(self) -> None:
        self._fit()
        count = len(self.state.last_token)
        self.state = self._join(self.state, [table[:count] for table in self.tables])

    def finish(self, row: int) -> None:
        """Marks a row as done: it emits nothing until it is filled again, and has no pages."""
        if len(self.rows) == 1:
            super().finish(row)
        elif self._state is not None:
            self._state = emptied(self.engine.insert, self._state, row, self._nothing)
        self.set_pages(row, [[]] * len(_PARTS))

    def _join(self, state: SpecState, tables: Sequence[Int32[np.ndarray, "b m"]]) -> SpecState:
        """Returns a state with layers and tables; nothing is copied."""
        parts = zip(_PARTS, self._layers, tables, strict=True)
        return state.replace(**{
            part: with_layers(getattr(state, part), layers, table)
            for part, layers, table in parts
        })  # fmt: skip

    def _part(self, state: SpecState) -> SpecState:
        """Takes the layers back; returns the state without them."""
        all_caches = (caches_in(getattr(state, part)) for part in _PARTS)
        self._layers = [[(cache.keys, cache.values) for cache in caches] for caches in all_caches]
        return map_caches(lambda cache: cache.replace(keys=(), values=()), state)

"""The rows that run together on the device, and which request is in which row."""

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from jspec import kernels
from jspec.common.errors import InputError, describe_error
from jspec.common.memory import Room, check_memory, fits
from jspec.common.timing import Instant
from jspec.generation.answer import Drafts, Round
from jspec.generation.capacity import next_smaller
from jspec.generation.compile_notice import describe_switches
from jspec.generation.engine import NARROW_PROMPT
from jspec.generation.programs import Programs
from jspec.generation.reading import Reading, token_logprobs
from jspec.generation.request import Settings
from jspec.generation.rows import Row
from jspec.generation.stats import RoundCounts
from jspec.sampling.pipeline import PROCESSORS
from jspec.sampling.processor import Processor
from jspec.sampling.settings import Switches
from jspec.speculation.acceptance.tree import depth_of
from jspec.speculation.types import SpecState, StepInfo, tree_depth


class Batch:
    """Rows that are filled with requests, run together, and filled again.

    Attributes:
      rows: indices of the rows.
      room: memory that their caches take.
    """

    def __init__(
        self, programs: Programs, num_rows: int, max_length: int, switches: Switches
    ) -> None:
        """Makes empty rows for requests of at most `max_length` tokens that need these switches.

        Raises:
          InputError: if there is not enough memory.
        """
        self._engine, self._params = programs.engine, programs.params
        drafter = self._engine.drafter
        self._drafter_of_kind = [] if drafter is None else [k.drafter for k in drafter.kinds]
        self._capacity, self._switches = self._engine.capacity_for(max_length), switches
        self.rows = range(num_rows)
        num_bytes, temporary = self._needs(self._capacity)
        self.room = Room(num_rows, self._capacity, num_bytes)
        check_memory(
            {f"caches of {self.room}": num_bytes, "temporary": temporary},
            self._advise,
        )
        parts = describe_switches(self._switches)
        self._tell = functools.partial(programs.compile_notice.around, [str(self.room), *parts])
        self._is_told = not programs.compile_notice.is_silent
        self._infos: StepInfo | None = None
        self._state: SpecState | None = None  # a single row has none until its prompt is read
        if num_rows > 1:
            self._state = self._empty_state(num_rows)

    @classmethod
    def for_requests(cls, programs: Programs, requests: Sequence[Row]) -> Self:
        """Returns a batch with room for the longest of all requests that will come.

        Raises:
          InputError: if there is not enough memory.
        """
        settings = [row.settings for row in requests]
        for processor in programs.processors[:-1]:  # the last is no user's
            check_processor(processor, settings[0], programs.target.config.vocab_size)
        # A power of two, so that another number of requests rarely needs another program.
        num_rows = min(programs.batch_size, 1 << (len(requests) - 1).bit_length())
        max_length = max(row.max_length for row in requests)
        return cls(programs, num_rows, max_length, needed_switches(settings, programs.processors))

    def _empty_state(self, num_rows: int) -> SpecState:
        return self._engine.empty_state(num_rows, self._capacity, self._switches)

    def _needs(self, capacity: int) -> tuple[int, int]:
        """Returns the bytes of states, and of what programs need beside them."""
        # Several rows need one state more: that of the prompt that is being read.
        counts = (1,) if len(self.rows) == 1 else (len(self.rows), 1)
        sizes = (self._engine.state_bytes(n, capacity, self._switches) for n in counts)
        return sum(sizes), self._engine.temporary_bytes(sum(counts), capacity)

    def _advise(self) -> str:
        """Returns what would fit, where the caches do not."""
        capacity = next_smaller(self._capacity)
        while capacity and not fits(sum(self._needs(capacity))):
            capacity = next_smaller(capacity)
        tokens = capacity - self._engine.num_draft_tokens - 1
        most = f"{tokens} tokens of prompt and answer (max_new_tokens) fit" if capacity else ""
        fewer = "fewer rows (batch_size)" * (len(self.rows) > 1)
        return ", or ".join(filter(None, (most, fewer))) or "a smaller model takes less"

    def fill(self, row: int, request: Row) -> Round:
        """Reads a request's prompt into a row; returns the answer's first token."""
        reading = self.begin(request)
        while not reading.is_done:
            self.read(reading)
        return self.insert(row, reading)

    def begin(self, request: Row) -> Reading:
        """Begins to read a prompt, as `insert` takes it; one at a time."""
        if len(self.rows) == 1:
            self._state = None  # frees the last request's cache before the next one is made
        state = self._engine.begin(request, self._capacity, self._switches)
        is_scored = request.settings.prompt_logprobs
        # Of a wide chunk the logits of each token would take too much memory.
        calls = self._engine.chunks(len(request.prompt), widest=0 if is_scored else None)
        return Reading(self._engine, self._params, request.prompt, state, calls, is_scored)

    def read(self, reading: Reading) -> int:
        """Reads the next chunk; returns its number of tokens."""
        with self._tell(is_long=len(reading.prompt) > NARROW_PROMPT):
            return reading.read()

    def insert(self, row: int, reading: Reading) -> Round:
        """Puts a request whose prompt was read into a row; returns the answer's first token."""
        prefilled = reading.state
        if len(self.rows) == 1:  # a single stream holds one cache, and copies none
            self._state = prefilled
        else:
            assert self._state is not None
            self._state = self._engine.insert(self._state, row, prefilled)
        with kernels.explained_failures():
            token, logprobs = jax.device_get((prefilled.last_token, prefilled.last_logprobs))
        if self._is_told and self._infos is None:
            # Compiles the loop now: told later, that would stand in the middle of a text.
            self.run(0)
        logprobs = jax.tree.map(operator.itemgetter(0), logprobs)
        scores = reading.scores
        return Round(token.tolist(), token_logprobs(logprobs, 1), prompt_logprobs=scores)

    def run(self, num_rounds: int) -> float:
        """Runs at most `num_rounds` rounds of every row; returns the seconds that they took."""
        begin = Instant()
        assert self._state is not None  # a row was filled
        with self._tell():
            self._state, self._infos = self._engine.run(self._params, self._state, num_rounds)
        return Instant().run_seconds_since(begin)

    def rounds(self, row: int) -> Iterator[Round]:
        """Yields what each round of the last run did in a row, where it emitted anything.

        Raises:
          InputError: a tree with wrong parents, or too deep a one.
        """
        if self._infos is None:
            return
        infos = jax.tree.map(lambda leaf: leaf[:, row], self._infos)
        depth = 0 if self._engine.drafter is None else tree_depth(self._engine.drafter)
        for index in np.flatnonzero(infos.num_tokens):
            info = jax.tree.map(operator.itemgetter(index), infos)
            num_proposed, drafter, drafts = int(info.num_proposed), "", Drafts()
            if num_proposed:
                drafter = self._drafter_of_kind[int(info.kind)]
                drafts = drafts_of(info.drafts, info.parents, num_proposed)
                # A drafter of the user's own may get them wrong.
                depth_of(drafts.parents, depth, f" of the drafter {drafter!r}")
            yield Round(
                token_ids=info.tokens[: info.num_tokens].tolist(),
                logprobs=token_logprobs(info.logprobs, info.num_tokens),
                counts=RoundCounts(num_proposed, int(info.num_accepted), drafter),
                drafts=drafts,
            )

    def finish(self, row: int) -> None:
        """Marks a row as done: it emits nothing until it is filled again."""
        assert self._state is not None
        self._state = self._engine.finish(self._state, row)


def drafts_of(tokens: np.ndarray, parents: np.ndarray | None, number: int) -> Drafts:
    """Returns a row's first drafts; tokens and parents are [w]."""
    of_tree = () if parents is None else tuple(parents[:number].tolist())
    return Drafts(tuple(tokens[:number].tolist()), of_tree)


def needed_switches(
    settings: Sequence[Settings], processors: tuple[Processor, ...] = ()
) -> Switches:
    """Returns what a program needs for these settings; the user's processors come last."""
    return Switches(
        top_k=any(one.top_k > 0 for one in settings),
        top_p=any(one.top_p < 1 for one in settings),
        min_p=any(one.min_p > 0 for one in settings),
        processors=tuple(p for p in (*PROCESSORS, *processors) if any(map(p.is_used, settings))),
        logprobs=any(one.logprobs for one in settings),
        top_logprobs=any(one.top_logprobs for one in settings),
    )


def check_processor(processor: Processor, settings: Settings, vocab_size: int) -> None:
    """Checks the shapes of a processor of the user's own; nothing is computed.

    Raises:
      InputError: it returns other than logits [b v] in float32, whatever it raises itself.
    """

    def first(logits: jax.Array) -> jax.Array:
        state = processor.init(settings, prompt=[0], stop_ids=[], vocab_size=vocab_size)
        state = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], state)
        return processor.apply(processor.update(state, jnp.zeros([1], jnp.int32)), logits)

    logits = jax.ShapeDtypeStruct((1, vocab_size), jnp.float32)
    try:
        found = jax.eval_shape(first, logits)
    except Exception as error:  # it is the user's code
        raise InputError(f"the processor {processor.name!r}: {describe_error(error)}") from None
    if getattr(found, "shape", None) != logits.shape or found.dtype != logits.dtype:
        raise InputError(
            f"expected the processor {processor.name!r} to return logits [1 {vocab_size}] float32 "
            f"for such logits, got {found}"
        )

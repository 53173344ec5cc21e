"""The rows that run together on the device, and which request is in which row.

A round computes the rows up to the last one that runs:

    rows      0   1   2   3 | 4   5   6   7
    running   x   x       x |                   the state has rows 0 to 3

A round takes longer with more rows, whether they run or not, and a server has slots for more
requests than there mostly are. Rows stay at their places: a new request takes the first free row,
so that those at the end are empty again before long.

Prompts are read chunk by chunk. A row that has the pages of a prompt's first chunks in its table,
and into which the snapshots of these chunks were put, in order, is bit for bit as if it had read
them. Nothing here knows what a drafter remembers: a snapshot has whatever reading a chunk may
change. A cache that a drafter fills only once it proposes stays empty, and the drafter catches up
in its first round, as after every prompt.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jspec import kernels
from jspec.common.errors import InputError, describe_error
from jspec.common.memory import CacheSize, check_memory, fits
from jspec.common.timing import Instant
from jspec.common.typing import RowCounts
from jspec.drafters.memory import History
from jspec.generation.answer import Drafts, Round
from jspec.generation.engine import CompileNotice, Engine, describe_switches
from jspec.generation.request import SamplingParams
from jspec.generation.result import RoundCounts, TokenLogprob
from jspec.generation.rows import Row, next_smaller
from jspec.models import KVCache
from jspec.models.cache import PagedKVCache, caches_in, map_caches
from jspec.sampling.distribution import TokenLogprobs
from jspec.sampling.settings import PROCESSORS, Processor, Switches
from jspec.speculation.acceptance.tree import depth_of
from jspec.speculation.control import drafters_of
from jspec.speculation.plain import insert
from jspec.speculation.types import ModelParams, SpecState, StepInfo


def emptied(
    put: Callable[..., SpecState], state: SpecState, row: int, nothing: SpecState
) -> SpecState:
    """Returns the state with an empty row in the place of an ended row, put there by `insert`.

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
    # A drafter begins to read again where it began.
    begins = iter([cache.begin for cache in caches_in(saved.draft)])
    draft = map_caches(lambda cache: cache.replace(begin=next(begins)), read.draft)
    row_state = read.replace(last_token=saved.last_token, control=control, draft=draft)
    state = insert(state, row, row_state)
    return state.replace(is_done=jnp.arange(len(state.is_done)) != row)


def settle(saved: SpecState, after: SpecState, row: Int32[Array, ""]) -> SpecState:
    """Returns what was saved; what its drafter has not read again is missing from its caches."""
    lengths = iter([cache.length[row] for cache in caches_in(after.draft)])

    def cut(cache: Any) -> Any:
        return cache.rollback(jnp.minimum(cache.length, next(lengths)))

    return saved.replace(draft=map_caches(cut, saved.draft))


_STEP = 4  # a round of four rows takes at most half as long again as one of one row


def row_counts(num_rows: int) -> tuple[int, ...]:
    """Returns the numbers of rows for which rounds are compiled, rising to `num_rows`.

    Each is a program, and a quarter of the next; a single row has its own program, as its
    products are the fastest. Few rows, up to 7, have no others.
    """
    counts = [num_rows]
    while counts[0] >= 2 * _STEP:
        counts.insert(0, counts[0] // _STEP)
    return (1, *counts) if 1 < counts[0] < num_rows else tuple(counts)


def fitted(
    state: SpecState,
    num_needed: int,
    counts: Sequence[int],
    make_empty: Callable[[int], SpecState],
) -> SpecState:
    """Returns a state of the fewest of `counts` rows that are enough; what is left out is empty.

    `make_empty` returns a state of as many rows as are to be added.
    """
    # Step by step, so that few programs are compiled for it.
    while len(state.last_token) < num_needed:
        count = len(state.last_token)
        more = counts[counts.index(count) + 1] - count
        state = _with_more(state, make_empty(more))
    while (place := counts.index(len(state.last_token))) and counts[place - 1] >= num_needed:
        state = _with_fewer(state, counts[place - 1])
    return state


# The jit boundary. Nothing is donated: results have other shapes than the arguments.
@jax.jit
def _with_more(state: SpecState, others: SpecState) -> SpecState:
    return jax.tree.map(lambda leaf, added: jnp.concatenate([leaf, added]), state, others)


@functools.partial(jax.jit, static_argnums=1)
def _with_fewer(state: SpecState, num_rows: int) -> SpecState:
    return jax.tree.map(lambda leaf: leaf[:num_rows], state)


# The same boundary; the large ones are donated.
@functools.partial(jax.jit, donate_argnums=0)
def _with_beginnings(large: Any, small: Any) -> Any:
    def put(leaf: Array, part: Array) -> Array:
        return jax.lax.dynamic_update_slice(leaf, part, (0,) * leaf.ndim)

    return jax.tree.map(put, large, small)


def rolled_back(target_cache: KVCache, draft: Any, length: RowCounts | int) -> tuple[KVCache, Any]:
    """Returns one row's caches with at most the first `length` tokens of their text.

    A drafter's text gets that length, too. What it remembers besides, such as a table, stays: it is
    no more than a guess of what follows, and is overwritten as the text goes on.
    """
    # A drafter's slot may belong to a token and the next one (see `drafters.eagle`).
    in_draft = jnp.maximum(length - 1, 0)

    def cut(node: Any) -> Any:
        if not is_text(node):
            return node
        if not isinstance(node, KVCache):
            return node.replace(length=jnp.minimum(node.length, length))
        if node.begin is None:
            return node.rollback(jnp.minimum(node.length, in_draft))
        # Where it began was another text's affair: what follows is to be as from a fresh start.
        return node.replace(length=jnp.zeros_like(node.length), begin=jnp.full_like(node.begin, -1))

    def is_text(node: Any) -> bool:
        return isinstance(node, KVCache | History)

    cache = target_cache.rollback(jnp.minimum(target_cache.length, length))
    return cache, jax.tree.map(cut, draft, is_leaf=is_text)


def cut_to(state: SpecState, length: RowCounts | int) -> SpecState:
    """Returns a row's state as if its text had only its first tokens; see `rolled_back`."""
    target_cache, draft = rolled_back(state.target_cache, state.draft, length)
    return state.replace(target_cache=target_cache, draft=draft)


Snapshot = tuple[Array, ...]


class Reading:
    """A prompt on its way into a state of one row.

    Attributes:
      prompt: its token ids.
      state: the row's, after what was read so far.
      scores: of each token read but the first, if they are wanted; then all of it is read.
    """

    def __init__(
        self,
        engine: Engine,
        params: ModelParams,
        prompt: Sequence[int],
        state: SpecState,
        calls: Sequence[tuple[int, int]],
        is_scored: bool = False,
    ) -> None:
        """Nothing is read yet; `calls` are the engine's `chunks` of the prompt."""
        self.prompt, self.state = prompt, state
        self._engine, self._params, self._calls = engine, params, calls
        self._num_read = 0  # calls
        self.scores: list[TokenLogprob] | None = [] if is_scored else None

    @property
    def is_done(self) -> bool:
        """Whether the whole prompt was read, and the first token drawn."""
        return self._num_read == len(self._calls)

    @property
    def widths(self) -> frozenset[int]:
        """The widths of its chunks."""
        return frozenset(width for _, width in self._calls)

    @property
    def next_chunk(self) -> tuple[int, int]:
        """First token and width of the chunk that is read next."""
        return self._calls[self._num_read]

    def read(self) -> int:
        """Reads the next chunk; returns its number of tokens."""
        begin, width = self.next_chunk
        self.state, scores = self._engine.read(
            self._params, self.state, self.prompt, begin, width, has_scores=self.scores is not None
        )
        if self.scores is not None:
            scores = jax.tree.map(operator.itemgetter(0), jax.device_get(scores))
            # After the prompt's last token comes one that is not the prompt's.
            self.scores += token_logprobs(scores, min(width, len(self.prompt) - begin - 1)) or ()
        self._num_read += 1
        return min(width, len(self.prompt) - begin)

    def put(self, snapshots: "Snapshots", found: Sequence[Snapshot]) -> None:
        """Puts snapshots in the place of the next chunks, whose tokens they must have."""
        for snapshot in found:
            self.state = snapshots.put(self.state, snapshot, self.next_chunk[0])
            self._num_read += 1


class Snapshots:
    """Copies what reading changes out of states of one row, and into others.

    The states are those of a batch of pages, without their layers.

    Attributes:
      copy: (state, first token, width) -> the snapshot of the chunk there, which was read last.
      copy_row: (state of any rows, row, first token, width) -> the same of one row's text, whatever
        it has after that chunk; only of drafters whose states can be cut there.
      put: (state, snapshot, first token) -> the state, donated, with the snapshot.
    """

    def __init__(
        self, engine: Engine, params: ModelParams, capacity: int, switches: Switches
    ) -> None:
        """Finds out which leaves a snapshot has; nothing is compiled yet."""
        state, longer = (
            engine.empty_state.eval_shape(1, slots, switches) for slots in (capacity, 2 * capacity)
        )
        changed = jax.tree.unflatten(jax.tree.structure(state), engine.is_read_into(params, state))
        axes = jax.tree.map(_token_axis, state, longer)
        # Of the leaves that reading changes: the number, and the axis of tokens, if any.
        pairs = zip(*(jax.tree.leaves(bare(tree)) for tree in (axes, changed)), strict=True)
        self._parts = [(n, axis) for n, (axis, is_changed) in enumerate(pairs) if is_changed]
        # The jit boundary. A row's state is donated, a snapshot never: other rows have it, too.
        self.copy = jax.jit(self._copy, static_argnums=2)
        self.copy_row = jax.jit(self._copy_row, static_argnums=3)
        self.put = jax.jit(self._put, donate_argnums=0)

    def _copy(self, state: SpecState, begin: Int32[Array, ""], width: int) -> Snapshot:
        leaves, slice_of = jax.tree.leaves(state), jax.lax.dynamic_slice_in_dim
        # A copy, or it would share the buffer of a leaf that the next chunk is written into.
        return tuple(
            jnp.copy(leaves[number]) if axis == _NO_AXIS
            else slice_of(_as_bits(leaves[number]), begin, width, axis)
            for number, axis in self._parts
        )  # fmt: skip

    def _copy_row(
        self, state: SpecState, row: Int32[Array, ""], begin: Int32[Array, ""], width: int
    ) -> Snapshot:
        return self._copy(cut_to(take_row(state, row), begin + width), begin, width)

    def _put(self, state: SpecState, snapshot: Snapshot, begin: Int32[Array, ""]) -> SpecState:
        leaves, structure = jax.tree.flatten(state)
        for (number, axis), part in zip(self._parts, snapshot, strict=True):
            old = leaves[number]
            if axis == _NO_AXIS:  # the next chunk must not be written into the snapshot
                leaves[number] = jnp.copy(part)
            else:
                new = jax.lax.dynamic_update_slice_in_dim(_as_bits(old), part, begin, axis)
                leaves[number] = jax.lax.bitcast_convert_type(new, old.dtype)
        return jax.tree.unflatten(structure, leaves)


def token_logprobs(logprobs: TokenLogprobs | None, count: int) -> list[TokenLogprob] | None:
    """Returns the first `count` log-probabilities of one row; None for None."""
    if logprobs is None:
        return None
    ids, best = logprobs.top_ids, logprobs.top
    tops: list[Sequence[tuple[int, float]]] = [()] * count
    # Where no row asks for them, all ids are -1.
    if count and ids is not None and best is not None and ids[0, 0] >= 0:
        pairs = zip(ids[:count].tolist(), best[:count].tolist(), strict=True)
        tops = [list(zip(*pair, strict=True)) for pair in pairs]
    raw, processed = logprobs.raw[:count].tolist(), logprobs.processed[:count].tolist()
    return list(map(TokenLogprob, raw, processed, tops))


_NO_AXIS = -1


def bare(state: Any, table: Any = False) -> Any:
    """Returns a state with paged caches in place of its caches: with this table, and no layers."""

    def to_pages(cache: KVCache) -> PagedKVCache:
        kept = {"length": cache.length, "is_split": cache.is_split, "begin": cache.begin}
        return PagedKVCache(keys=(), values=(), table=table, **kept)

    return map_caches(to_pages, state)


def _as_bits(leaf: Array) -> Array:
    # XLA on CPU may convert the whole of a bfloat16 array, and back, to write a slice of it.
    is_short = leaf.dtype == jnp.bfloat16
    return jax.lax.bitcast_convert_type(leaf, jnp.uint16) if is_short else leaf


def _token_axis(shape: jax.ShapeDtypeStruct, larger_shape: jax.ShapeDtypeStruct) -> int:
    """Returns the axis along which leaves of two capacities differ; -1 if there is none."""
    pairs = enumerate(zip(shape.shape, larger_shape.shape, strict=True))
    return next((axis for axis, (size, larger) in pairs if size != larger), _NO_AXIS)


class Batch:
    """Rows that are filled with requests, run together, and filled again.

    Attributes:
      engine: its programs.
      rows: indices of the rows.
      num_apart: how many rows `fill` can give requests of their own, while rounds are measured.
      max_length: the most tokens that a row may have.
      cache_size: memory that their caches take.
      params: parameters of target and drafter, the latter with the answers that it remembers.
    """

    def __init__(
        self,
        engine: Engine,
        params: ModelParams,
        notice: CompileNotice,
        num_rows: int,
        max_length: int,
        switches: Switches,
    ) -> None:
        """Makes empty rows for requests of at most `max_length` tokens that need these switches.

        Raises:
          InputError: if there is not enough memory.
        """
        self.engine, self.params = engine, params
        drafter = self.engine.drafter
        self._drafter_of_kind = [] if drafter is None else [k.drafter for k in drafter.kinds]
        self._capacity, self._switches = self.engine.capacity_for(max_length), switches
        self.rows, self.num_apart = range(num_rows), num_rows
        self.max_length = self._capacity - engine.num_draft_tokens - 1
        num_bytes, temporary = self._needs(self._capacity)
        self.cache_size = CacheSize(num_rows, self._capacity, num_bytes)
        check_memory(
            {f"caches of {self.cache_size}": num_bytes, "temporary": temporary},
            self._advise,
        )
        parts = describe_switches(self._switches)
        self._tell = functools.partial(notice.around, [str(self.cache_size), *parts])
        self._is_told = not notice.is_silent
        self._infos: StepInfo | None = None
        self._state: SpecState | None = None  # a single row has none until its prompt is read
        if num_rows > 1:
            self._state = self._empty_state(num_rows)

    def _empty_state(self, num_rows: int) -> SpecState:
        return self.engine.empty_state(num_rows, self._capacity, self._switches)

    def _needs(self, capacity: int) -> tuple[int, int]:
        """Returns the bytes of states, and of what programs need beside them."""
        # Several rows need one state more: that of the prompt that is being read.
        counts = (1,) if len(self.rows) == 1 else (len(self.rows), 1)
        sizes = (self.engine.state_bytes(n, capacity, self._switches) for n in counts)
        return sum(sizes), self.engine.temporary_bytes(sum(counts), capacity)

    def _advise(self) -> str:
        """Returns what would fit, where the caches do not."""
        capacity = next_smaller(self._capacity)
        while capacity and not fits(sum(self._needs(capacity))):
            capacity = next_smaller(capacity)
        tokens = capacity - self.engine.num_draft_tokens - 1
        most = f"{tokens} tokens of prompt and answer (max_new_tokens) fit" if capacity else ""
        fewer = "fewer rows (batch_size)" * (len(self.rows) > 1)
        return ", or ".join(filter(None, (most, fewer))) or "a smaller model takes less"

    @property
    def state(self) -> SpecState:
        """The rows' state, without what lies in pages. The next call that runs them deletes it."""
        assert self._state is not None  # a row was filled
        return self._state

    @state.setter
    def state(self, state: SpecState) -> None:
        self._state = state

    def change(self, do: Callable[[ModelParams, SpecState], SpecState]) -> None:
        """Replaces the state by what a function makes of it; it is the function's to donate."""
        self._state = do(self.params, self.state)

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
        state = self.engine.begin(request, self._capacity, self._switches)
        state = self.engine.read_source(self.params, state, request)
        is_scored = request.settings.prompt_logprobs
        # Of a chunk of 256 the logits of each token would take too much memory.
        calls = self.engine.chunks(len(request.prompt), widest=kernels.CHUNK if is_scored else None)
        return Reading(self.engine, self.params, request.prompt, state, calls, is_scored)

    def fits(self, max_length: int, switches: Switches) -> bool:
        """Returns whether its programs answer requests of this length that need these switches."""
        return max_length <= self.max_length and switches == self._switches

    def begin_after(self, before: Self, request: Row, num_kept: int) -> Reading:
        """Begins to read a prompt whose first `num_kept` tokens are in the caches of another batch.

        Both have one row. `before` may be this batch itself, and has no state from then on; its
        caches are taken over, or copied where those of this batch are larger.
        """
        engine, state = self.engine, before._state
        assert state is not None
        texts, before._state = (state.target_cache, state.draft), None
        if before._capacity < self._capacity:
            empty = engine.empty_state(1, self._capacity, self._switches)
            texts = _with_beginnings((empty.target_cache, empty.draft), texts)
        # Of the smallest capacity, as its caches are replaced at once.
        state = engine.begin(request, engine.capacity_for(1), self._switches)
        target_cache, draft = texts
        state = cut_to(state.replace(target_cache=target_cache, draft=draft), num_kept)
        calls = [
            (num_kept + begin, width)
            for begin, width in engine.chunks(len(request.prompt) - num_kept)
        ]
        return Reading(engine, self.params, request.prompt, state, calls)

    def read(self, reading: Reading) -> int:
        """Reads the next chunk; returns its number of tokens."""
        with self._tell(reading.widths):
            return reading.read()

    def insert(self, row: int, reading: Reading) -> Round:
        """Puts a request whose prompt was read into a row; returns the answer's first token."""
        prefilled = reading.state
        if len(self.rows) == 1:  # a single stream holds one cache, and copies none
            self._state = prefilled
        else:
            assert self._state is not None
            self._state = self.engine.insert(self._state, row, prefilled)
        with kernels.explained_failures():
            token, logprobs = jax.device_get((prefilled.last_token, prefilled.last_logprobs))
        if self._is_told and self._infos is None:
            # Compiles the loop at once: told later, that would stand in the middle of a text.
            self.run(0)
        logprobs = jax.tree.map(operator.itemgetter(0), logprobs)
        scores = reading.scores
        return Round(token.tolist(), token_logprobs(logprobs, 1), prompt_logprobs=scores)

    def run(self, num_rounds: int) -> float:
        """Runs at most `num_rounds` rounds of every row; returns the seconds that they took."""
        begin = Instant()
        with self._tell():
            self._state, self._infos = self.engine.run(self.params, self.state, num_rounds)
        return Instant().run_seconds_since(begin)

    def rounds(self, row: int) -> Iterator[Round]:
        """Yields what each round of the last run did in a row, where it emitted anything.

        Raises:
          InputError: a tree with wrong parents, or one that is too deep.
        """
        if self._infos is None:
            return
        infos = jax.tree.map(lambda leaf: leaf[:, row], self._infos)
        depth = 0 if self.engine.drafter is None else self.engine.drafter.tree_depth
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
        self._state = self.engine.finish(self._state, row)

    def remember(self, token_ids: Sequence[int]) -> None:
        """Lets the next rounds look up an answer that has ended, if the drafter does so."""
        self.params = self.engine.remember(self.params, token_ids)

    def forget(self) -> None:
        """Forgets the answers that the drafter remembers."""
        self.params = self.engine.forget(self.params)

    @property
    def has_memory(self) -> bool:
        """Whether the drafter looks up earlier answers."""
        return self.engine.keeps_answers


def drafts_of(tokens: np.ndarray, parents: np.ndarray | None, number: int) -> Drafts:
    """Returns a row's first drafts; tokens and parents are [w]."""
    of_tree = () if parents is None else tuple(parents[:number].tolist())
    return Drafts(tuple(tokens[:number].tolist()), of_tree)


def needed_switches(
    settings: Sequence[SamplingParams], processors: tuple[Processor, ...] = ()
) -> Switches:
    """Returns what a program needs for these settings; the user's processors come last."""
    return Switches(
        top_k=any(params.top_k > 0 for params in settings),
        top_p=any(params.top_p < 1 for params in settings),
        min_p=any(params.min_p > 0 for params in settings),
        processors=tuple(p for p in (*PROCESSORS, *processors) if any(map(p.is_used, settings))),
        logprobs=any(params.logprobs for params in settings),
        top_logprobs=any(params.top_logprobs for params in settings),
        draft_filters=any(
            params.draft_sampling[1:] != (params.top_k, params.top_p) for params in settings
        ),
    )


def check_processor(processor: Processor, settings: SamplingParams, vocab_size: int) -> None:
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
        result = jax.eval_shape(first, logits)
    except Exception as error:  # it is the user's code
        raise InputError(f"the processor {processor.name!r}: {describe_error(error)}") from None
    if getattr(result, "shape", None) != logits.shape or result.dtype != logits.dtype:
        raise InputError(
            f"expected the processor {processor.name!r} to return logits [1 {vocab_size}] float32 "
            f"for such logits, got {result}"
        )

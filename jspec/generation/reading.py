"""Prompts that are read chunk by chunk, and pages: what reading a chunk leaves, for other rows.

    prompt            | chunk | chunk | chunk | rest |
    keys and values   |       |=======|       |        of a page: the slots of its chunk
    lengths and more                  |                as they are after the chunk

A row into which the pages of a prompt's first chunks were put, in order, is bit for bit as if it
had read them. Nothing here knows what a drafter remembers: a page has whatever reading a chunk may
change. A cache that a drafter fills only once it proposes stays empty, and the drafter catches up
in its first round, as after every prompt.
"""

import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jspec.generation.engine import Engine
from jspec.generation.result import TokenLogprob
from jspec.generation.rows import Row
from jspec.sampling.settings import Switches
from jspec.speculation.logprobs import TokenLogprobs
from jspec.speculation.types import ModelParams, SpecState

Page = tuple[Array, ...]
_COUNTS = (8, 4, 2, 1)  # of pages that one call puts; each call may pass over the whole cache


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
        request: Row,
        state: SpecState,
        calls: Sequence[tuple[int, int]],
    ) -> None:
        """Nothing is read yet; `calls` are the engine's `chunks` of the prompt."""
        self.prompt, self.state = request.prompt, state
        self._engine, self._params, self._calls = engine, params, calls
        self._num_read = 0  # calls
        self.scores: list[TokenLogprob] | None = [] if request.settings.prompt_logprobs else None

    @property
    def is_done(self) -> bool:
        """Whether the whole prompt was read, and the first token drawn."""
        return self._num_read == len(self._calls)

    def chunk(self, ahead: int = 0) -> tuple[int, ...] | None:
        """Returns a chunk that a page may replace, its token ids; None if there is none.

        It is the next one, or one further `ahead`. The prompt's last chunk is always read: after
        it the first token is drawn.
        """
        if self.scores is not None or self._num_read + ahead + 1 >= len(self._calls):
            return None
        begin, width = self._calls[self._num_read + ahead]
        return tuple(self.prompt[begin : begin + width])

    def read(self) -> int:
        """Reads the next chunk; returns its number of tokens."""
        begin, width = self._calls[self._num_read]
        self.state, found = self._engine.read(
            self._params, self.state, self.prompt, begin, width, has_scores=self.scores is not None
        )
        if self.scores is not None:
            found = jax.tree.map(operator.itemgetter(0), jax.device_get(found))
            # After the prompt's last token comes one that is not the prompt's.
            self.scores += token_logprobs(found, min(width, len(self.prompt) - begin - 1)) or ()
        self._num_read += 1
        return min(width, len(self.prompt) - begin)

    def copy(self, pages: "Pages") -> Page:
        """Returns the page of the chunk that was read last, which must be a full one."""
        begin, width = self._calls[self._num_read - 1]
        return pages.copy(self.state, begin, width)

    def put(self, pages: "Pages", found: Sequence[Page]) -> None:
        """Puts pages in the place of the next chunks, whose tokens they must have."""
        end = self._num_read + len(found)
        while self._num_read < end:
            begin, width = self._calls[self._num_read]
            alike = [call for call in self._calls[self._num_read : end] if call[1] == width]
            count = next(count for count in _COUNTS if count <= len(alike))
            now, found = tuple(found[:count]), found[count:]
            self.state = pages.put(self.state, now, begin)
            self._num_read += count


class Pages:
    """Copies pages out of states of one row, and into others of the same capacity.

    Attributes:
      copy: (state, first token, width) -> the page of the chunk there, which was read last.
      put: (state, pages of one width, first token) -> the state, donated, with the pages.
    """

    def __init__(
        self, engine: Engine, params: ModelParams, capacity: int, switches: Switches
    ) -> None:
        """Finds out which leaves a page has; nothing is compiled yet."""
        one, other = (
            engine.empty_state.eval_shape(1, slots, switches) for slots in (capacity, 2 * capacity)
        )
        axes = map(_token_axis, jax.tree.leaves(one), jax.tree.leaves(other))
        is_changed = engine.is_read_into(params, one)
        # Of the leaves that reading changes: the number, and the axis of tokens if it has one.
        self._parts = [
            (number, axis)
            for number, (axis, changed) in enumerate(zip(axes, is_changed, strict=True))
            if changed
        ]
        self._chunks = engine.chunks
        # The jit boundary. A row's state is donated, a page never: other rows have it, too.
        self.copy = jax.jit(self._copy, static_argnums=2)
        self.put = jax.jit(self._put, donate_argnums=0)

    def _copy(self, state: SpecState, begin: Int32[Array, ""], width: int) -> Page:
        leaves, slice_of = jax.tree.leaves(state), jax.lax.dynamic_slice_in_dim
        # A copy, or the page would share the buffer of a leaf that the next chunk is written into.
        return tuple(
            jnp.copy(leaves[number]) if axis is None
            else slice_of(_as_bits(leaves[number]), begin, width, axis)
            for number, axis in self._parts
        )  # fmt: skip

    def warm_up(self, state: SpecState, capacity: int, widest: int) -> None:
        """Compiles all that is needed for chunks that are not wider; the state is donated."""
        for width in {width for _, width in self._chunks(capacity - 1, widest=widest)}:
            page = self.copy(state, 0, width)
            for count in _COUNTS:
                if count * width <= capacity:
                    state = self.put(state, (page,) * count, 0)

    def _put(self, state: SpecState, pages: tuple[Page, ...], begin: Int32[Array, ""]) -> SpecState:
        leaves, structure = jax.tree.flatten(state)
        for (number, axis), *parts in zip(self._parts, *pages, strict=True):
            old = leaves[number]
            if axis is None:  # the next chunk must not be written into the page
                leaves[number] = jnp.copy(parts[-1])
            else:
                part = jnp.concatenate(parts, axis)
                new = jax.lax.dynamic_update_slice_in_dim(_as_bits(old), part, begin, axis)
                leaves[number] = jax.lax.bitcast_convert_type(new, old.dtype)
        return jax.tree.unflatten(structure, leaves)


def token_logprobs(found: TokenLogprobs | None, count: int) -> list[TokenLogprob] | None:
    """Returns the first `count` log-probabilities of one row; None for None."""
    if found is None:
        return None
    ids, best = found.top_ids, found.top
    tops: list[Sequence[tuple[int, float]]] = [()] * count
    # Where no row asks for them, all ids are -1.
    if count and ids is not None and best is not None and ids[0, 0] >= 0:
        pairs = zip(ids[:count].tolist(), best[:count].tolist(), strict=True)
        tops = [list(zip(*pair, strict=True)) for pair in pairs]
    raw, processed = found.raw[:count].tolist(), found.processed[:count].tolist()
    return list(map(TokenLogprob, raw, processed, tops))


def _as_bits(leaf: Array) -> Array:
    # XLA on CPU may convert the whole of a bfloat16 cache, and back, to write a slice of it.
    is_short = leaf.dtype == jnp.bfloat16
    return jax.lax.bitcast_convert_type(leaf, jnp.uint16) if is_short else leaf


def _token_axis(one: jax.ShapeDtypeStruct, other: jax.ShapeDtypeStruct) -> int | None:
    """Returns the axis along which leaves of two capacities differ; None if there is none."""
    pairs = enumerate(zip(one.shape, other.shape, strict=True))
    return next((axis for axis, (size, larger) in pairs if size != larger), None)

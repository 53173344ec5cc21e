"""Prompts that are read chunk by chunk, and what reading a chunk leaves besides keys and values.

A row that has the pages of a prompt's first chunks in its table, and into which the snapshots of
these chunks were put, in order, is bit for bit as if it had read them. Nothing here knows what a
drafter remembers: a snapshot has whatever reading a chunk may change. A cache that a drafter fills
only once it proposes stays empty, and the drafter catches up in its first round, as after every
prompt.
"""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jspec.generation.engine import Engine
from jspec.generation.result import TokenLogprob
from jspec.models import KVCache
from jspec.models.paged_cache import PagedKVCache, map_caches
from jspec.sampling.settings import Switches
from jspec.speculation.logprobs import TokenLogprobs
from jspec.speculation.types import ModelParams, SpecState

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
    def next_chunk(self) -> tuple[int, int]:
        """First token and width of the chunk that is read next."""
        return self._calls[self._num_read]

    def read(self) -> int:
        """Reads the next chunk; returns its number of tokens."""
        begin, width = self.next_chunk
        self.state, found = self._engine.read(
            self._params, self.state, self.prompt, begin, width, has_scores=self.scores is not None
        )
        if self.scores is not None:
            found = jax.tree.map(operator.itemgetter(0), jax.device_get(found))
            # After the prompt's last token comes one that is not the prompt's.
            self.scores += token_logprobs(found, min(width, len(self.prompt) - begin - 1)) or ()
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
      put: (state, snapshot, first token) -> the state, donated, with the snapshot.
    """

    def __init__(
        self, engine: Engine, params: ModelParams, capacity: int, switches: Switches
    ) -> None:
        """Finds out which leaves a snapshot has; nothing is compiled yet."""
        one, other = (
            engine.empty_state.eval_shape(1, slots, switches) for slots in (capacity, 2 * capacity)
        )
        changed = jax.tree.unflatten(jax.tree.structure(one), engine.is_read_into(params, one))
        axes = jax.tree.map(_token_axis, one, other)
        # Of the leaves that reading changes: the number, and the axis of tokens if it has one.
        pairs = zip(*(jax.tree.leaves(bare(tree)) for tree in (axes, changed)), strict=True)
        self._parts = [(n, axis) for n, (axis, is_changed) in enumerate(pairs) if is_changed]
        # The jit boundary. A row's state is donated, a snapshot never: other rows have it, too.
        self.copy = jax.jit(self._copy, static_argnums=2)
        self.put = jax.jit(self._put, donate_argnums=0)

    def _copy(self, state: SpecState, begin: Int32[Array, ""], width: int) -> Snapshot:
        leaves, slice_of = jax.tree.leaves(state), jax.lax.dynamic_slice_in_dim
        # A copy, or it would share the buffer of a leaf that the next chunk is written into.
        return tuple(
            jnp.copy(leaves[number]) if axis == _NO_AXIS
            else slice_of(_as_bits(leaves[number]), begin, width, axis)
            for number, axis in self._parts
        )  # fmt: skip

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


_NO_AXIS = -1


def bare(state: Any, table: Any = False) -> Any:
    """Returns a state with paged caches in place of its caches: with this table, and no layers."""

    def to_pages(cache: KVCache) -> PagedKVCache:
        kept = {"length": cache.length, "is_split": cache.is_split}
        return PagedKVCache(keys=(), values=(), table=table, **kept)

    return map_caches(to_pages, state)


def _as_bits(leaf: Array) -> Array:
    # XLA on CPU may convert the whole of a bfloat16 array, and back, to write a slice of it.
    is_short = leaf.dtype == jnp.bfloat16
    return jax.lax.bitcast_convert_type(leaf, jnp.uint16) if is_short else leaf


def _token_axis(one: jax.ShapeDtypeStruct, other: jax.ShapeDtypeStruct) -> int:
    """Returns the axis along which leaves of two capacities differ; -1 if there is none."""
    pairs = enumerate(zip(one.shape, other.shape, strict=True))
    return next((axis for axis, (size, larger) in pairs if size != larger), _NO_AXIS)

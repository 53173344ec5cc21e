"""A request as one row of a batch: checks that need the model, and its state on the device.

A cache has one of a few sizes, so that few programs are compiled. On a mesh the rows of a state lie
over `data`, and the heads of its caches over `model`.
"""

import hashlib
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jspec.common.errors import InputError
from jspec.generation.request import SamplingParams
from jspec.kernels import MODEL_AXIS
from jspec.models import KVCache, init_cache
from jspec.models.cache import PagedKVCache
from jspec.sampling.distribution import SamplingSettings, token_logprobs
from jspec.sampling.settings import Switches
from jspec.speculation.control import Control
from jspec.speculation.round import silence
from jspec.speculation.types import Drafter, SpecState
from jspec.weights.resolver import LoadedModel
from jspec.weights.vocabulary import used_vocab_size

_SMALLEST_CAPACITY = 512
_SMALLEST_IN_BETWEEN = 3072


def capacity_for(max_length: int, head_room: int) -> int:
    """Returns the smallest of a few capacities that is enough: 512, 1024, 2048, 3072, 4096, ...

    A block of `head_room` tokens may be written after the last token of a row.
    """
    num_slots = max_length + head_room
    double = max(_SMALLEST_CAPACITY, 1 << (num_slots - 1).bit_length())
    between = double // 4 * 3  # doubling a large cache is expensive
    return between if between >= max(num_slots, _SMALLEST_IN_BETWEEN) else double


def next_smaller(capacity: int) -> int:
    """Returns the capacity below one of them; 0 below the smallest."""
    if capacity <= _SMALLEST_CAPACITY:
        return 0
    if capacity & (capacity - 1):  # three quarters of a power of two
        return capacity // 3 * 2
    return capacity // 4 * 3 if capacity > _SMALLEST_IN_BETWEEN else capacity // 2


def state_specs(state: Any, rows: tuple[str, ...]) -> Any:
    """Returns the spec of each leaf of a state whose rows are split over these axes, or none."""

    def of(part: Any) -> Any:
        layer = PartitionSpec(*rows)
        if isinstance(part, PagedKVCache):
            layer = page_spec(part.is_split)
        elif isinstance(part, KVCache) and part.is_split:
            layer = PartitionSpec(*(rows or (None,)), MODEL_AXIS)
        return jax.tree.map(lambda leaf: layer if leaf.ndim == 4 else PartitionSpec(*rows), part)

    return jax.tree.map(of, state, is_leaf=lambda part: isinstance(part, KVCache))


def page_spec(is_split: bool) -> PartitionSpec:
    """Returns the spec of a layer's pages, whose heads are split or not.

    Each row of the mesh holds all of them. All read every prompt, into the same pages; what
    an answer adds is written by the row of the mesh that it is in, and read by that row only.
    """
    return PartitionSpec(None, MODEL_AXIS) if is_split else PartitionSpec()


MAX_STOP_IDS = 8


class Row(NamedTuple):
    """A request in the form that the engine takes.

    Attributes:
      settings: the user's settings.
      prompt: token ids of the prompt.
      stop_ids: every token that ends the answer, at most `MAX_STOP_IDS`.
      max_length: maximum number of tokens, prompt included.
      costs: seconds of this row's rounds among all, [m c], and alone, [m c], and per token that a
        drafter has not read yet, [m], as `Control` has them; None where the number of drafts is
        fixed.
      source: of an encoder-decoder what the encoder reads: token ids [s], or a spectrogram
        [frames mels]; the prompt is then what the decoder begins with.
      measured: what drafts of other answers were accepted, and decided, [k 2], and the answers'
        mean length; None where that is unknown.
    """

    settings: SamplingParams
    prompt: Sequence[int]
    stop_ids: Sequence[int]
    max_length: int
    costs: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    measured: tuple[np.ndarray, np.ndarray, int] | None = None
    source: np.ndarray | None = None


_NO_REQUEST = Row(SamplingParams(), prompt=(), stop_ids=(), max_length=0)


def make_row(
    prompt: list[int],
    settings: SamplingParams,
    target: LoadedModel,
    max_seq_len: int,
    source: np.ndarray | None = None,
) -> Row:
    """Returns the row of a request; prompt and answer have at most `max_seq_len` tokens together.

    The source of an encoder-decoder is as `read_source` returns it.

    Raises:
      InputError: if the model cannot answer the request.
    """
    if not prompt:
        raise InputError("expected a prompt of at least one token, got none")
    if len(prompt) >= max_seq_len:
        raise InputError(
            f"expected a prompt of fewer tokens than the context's {max_seq_len}, got {len(prompt)}"
        )
    # An id that pads the vocabulary has no probability, which could be told.
    num_ids = used_vocab_size(target) if settings.prompt_logprobs else target.config.vocab_size
    _check_ids("prompt token ids", prompt, num_ids)
    stop_ids = {*target.config.eos_ids, *settings.stop_token_ids}
    if len(stop_ids) > MAX_STOP_IDS:
        raise InputError(
            f"expected at most {MAX_STOP_IDS} stop token ids, the model's own among them, got "
            f"{len(stop_ids)}"
        )
    _check_ids("stop_token_ids", settings.stop_token_ids, target.config.vocab_size)
    _check_token_settings(settings, stop_ids, used_vocab_size(target))
    if settings.pattern is not None:
        _check_before_pattern(prompt, target)
    max_length = min(len(prompt) + settings.max_new_tokens, max_seq_len)
    if source is not None and source.ndim == 1:
        _check_ids("source token ids", source.tolist(), target.config.vocab_size)
    return Row(settings, prompt, tuple(stop_ids), max_length, source=source)


def _check_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise InputError(
            f"expected {name} from 0 to {vocab_size - 1}, got some from {min(ids)} to {max(ids)}"
        )


def _check_before_pattern(prompt: Sequence[int], target: LoadedModel) -> None:
    """Refuses a prompt after which a token's text is not what the pattern takes it for."""
    stream = target.tokenizer.stream(prompt)
    if stream.is_inside_character:
        raise InputError("expected a prompt of whole characters before a pattern, got half a one")
    if not stream.is_begun and target.tokenizer.strips:
        raise InputError("expected a prompt with text before a pattern, got special tokens alone")


def _check_token_settings(
    settings: SamplingParams, stop_ids: Collection[int], vocab_size: int
) -> None:
    """Checks that settings name tokens of the vocabulary and leave at least one to emit."""
    _check_ids("logit_bias for token ids", dict(settings.logit_bias), vocab_size)
    _check_ids("allowed_token_ids", settings.allowed_token_ids or (), vocab_size)
    _check_ids("forbidden_token_ids", settings.forbidden_token_ids, vocab_size)
    forbidden = set(settings.forbidden_token_ids)
    ends = {token_id for token_id in stop_ids if token_id < vocab_size} - forbidden
    num_left = vocab_size - len(forbidden)
    if settings.allowed_token_ids is not None:
        left = set(settings.allowed_token_ids) - forbidden
        ends, num_left = ends & left, len(left)
    if not num_left:
        raise InputError(
            "expected allowed_token_ids and forbidden_token_ids to leave at least one token, got "
            "every one forbidden"
        )
    if settings.min_new_tokens and num_left == len(ends):
        raise InputError(
            "expected a token besides those that end the answer, for min_new_tokens "
            f"{settings.min_new_tokens}; got none allowed"
        )


def empty_state(
    target: LoadedModel,
    drafter: Drafter | None,
    numbers: Sequence[int],
    batch_size: int,
    capacity: int,
    switches: Switches,
) -> SpecState:
    """Returns a state whose rows, with caches of `capacity` slots, are all done; see `Engine`."""
    zeros = jnp.zeros([batch_size], jnp.int32)
    ones = jnp.ones([batch_size], jnp.float32)
    states = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (batch_size, *leaf.shape)),
        _processor_states(_NO_REQUEST, switches, target.config.vocab_size),
    )
    control = None
    if drafter is not None and numbers:
        control = Control.init(batch_size, kinds=drafter.kinds, numbers=numbers)
    dtype = target.params["embedding"].dtype
    wants_top = jnp.zeros([batch_size], bool) if switches.top_logprobs else None
    settings = SamplingSettings(0 * ones, zeros, ones, 0 * ones, states, wants_top, switches)
    logprobs = None
    if switches.logprobs:
        one_logit = jnp.zeros([batch_size, 1, target.config.vocab_size])
        logprobs = jax.tree.map(
            jnp.zeros_like, token_logprobs(one_logit, one_logit, zeros[:, None], settings)
        )
    return SpecState(
        target_cache=init_cache(
            target.config, batch_size=batch_size, capacity=capacity, dtype=dtype
        ),
        draft=None if drafter is None else drafter.init(batch_size, capacity + source_room(target)),
        last_token=zeros,
        seed=zeros.astype(jnp.uint32),
        settings=settings,
        draft_temperature=0 * ones,
        draft_top_k=zeros if switches.draft_filters else None,
        draft_top_p=ones if switches.draft_filters else None,
        stop_ids=jnp.full([batch_size, MAX_STOP_IDS], -1, jnp.int32),
        max_length=zeros,
        is_done=jnp.ones([batch_size], bool),
        control=control,
        last_logprobs=logprobs,
    )


def source_room(target: LoadedModel) -> int:
    """Returns how many tokens of a source a drafter may have to remember before the answer."""
    encoder = target.config.encoder
    return 0 if encoder is None or encoder.is_audio else encoder.max_len


def with_request(state: SpecState, row: Row, vocab_size: int) -> SpecState:
    """Returns an empty one-row state with everything that the request decides.

    Most of it stays on the host until a program takes it: each array that is made on a device takes
    a tenth of a millisecond or more.
    """
    settings, switches = row.settings, state.settings.switches
    stop_ids = sorted(set(row.stop_ids))
    stop_ids += [-1] * (MAX_STOP_IDS - len(stop_ids))
    temperature, top_k, top_p = settings.draft_sampling
    states = _processor_states(row, switches, vocab_size)
    control = state.control
    if control is not None and row.costs is not None:
        costs, alone, reading = (np.asarray(leaf, np.float32)[None] for leaf in row.costs)
        control = control.replace(costs=costs, alone=alone, reading=reading)
        if row.measured is not None:
            control = control.with_measured(*row.measured)
    return state.replace(
        seed=np.array([_key_of(settings.seed)], np.uint32),
        settings=state.settings.replace(
            temperature=np.array([settings.temperature], np.float32),
            top_k=np.array([settings.top_k], np.int32),
            top_p=np.array([settings.top_p], np.float32),
            min_p=np.array([settings.min_p], np.float32),
            states=jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], states),
            wants_top=np.array([settings.top_logprobs > 0]) if switches.top_logprobs else None,
        ),
        draft_temperature=np.array([temperature], np.float32),
        draft_top_k=np.array([top_k], np.int32) if switches.draft_filters else None,
        draft_top_p=np.array([top_p], np.float32) if switches.draft_filters else None,
        stop_ids=np.array([stop_ids], np.int32),
        max_length=np.array([row.max_length], np.int32),
        is_done=np.array([False]),
        control=control,
    )


def _key_of(seed: int) -> int:
    """Returns a seed of 64 bits as the device's 32: itself, if it is small enough, or a hash."""
    if 0 <= seed < 2**32:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little", signed=True), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def finish_row(state: SpecState, row: jax.Array) -> SpecState:
    """Returns the state with a row, a scalar, marked as done: it neither commits nor emits."""
    return silence(state, state.is_done.at[row].set(True))


def _processor_states(row: Row, switches: Switches, vocab_size: int) -> tuple[Any, ...]:
    """Returns the state of each processor for one row, without the row's axis."""
    prompt, stop_ids = list(row.prompt), list(row.stop_ids)
    return tuple(
        processor.init(row.settings, prompt=prompt, stop_ids=stop_ids, vocab_size=vocab_size)
        for processor in switches.processors
    )

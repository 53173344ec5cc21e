"""Timestamps in a transcript: the tokens, and the processor that keeps them in order.

A Whisper writes `<|0.00|> A sentence.<|2.40|><|2.40|> Another one.<|5.00|>`: a segment between two
timestamps, which count 20 ms each. Every token must respect what the tokens before it leave
possible (arXiv 2212.04356, section 4.5): a transcript begins with a timestamp of at most a second;
timestamps come in pairs and never go back; and where all timestamps together are more likely than
any single other token it is a timestamp. This is an ordinary logits processor, so drafts are
held to it, too.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.errors import InputError
from jspec.common.typing import RowFlags, RowTokens
from jspec.sampling.settings import Processor
from jspec.weights import TokenizerLike

SECONDS = 0.02  # of a timestamp
_FIRST_AT_MOST = 50  # a transcript begins within its first second
_TASKS = "transcribe", "translate"
_ENGLISH_VOCABULARY = 51_864  # of models that know English alone, though their tokenizers do not


class SpecialTokens(NamedTuple):
    """The tokens of a Whisper that stand for no text.

    Attributes:
      start: begins every text of the decoder.
      end: ends it; ids below are texts.
      languages: by name, such as "en"; empty for a model of one language.
      tasks: "transcribe" and "translate"; empty for a model of one language.
      no_timestamps: says that none follow; ids above are timestamps.
      others: that a transcript never has.
    """

    start: int
    end: int
    languages: dict[str, int]
    tasks: dict[str, int]
    no_timestamps: int
    others: tuple[int, ...]

    @property
    def first_time(self) -> int:
        """The timestamp 0.00."""
        return self.no_timestamps + 1

    @classmethod
    def of(cls, tokenizer: TokenizerLike, start: int, vocab_size: int) -> Self:
        """Returns those of a tokenizer; `start` and `vocab_size` are the config's.

        Raises:
          InputError: it lacks a token.
        """
        ids = {name[2:-2]: i for name, i in tokenizer.vocabulary().items() if name[:2] == "<|"}
        for name in ("endoftext", "notimestamps"):
            if name not in ids:
                raise InputError(f"expected the token <|{name}|> in the tokenizer, got none")
        end, last = ids["endoftext"], ids["notimestamps"]
        tasks = {task: ids[task] for task in _TASKS if task in ids}
        first_task = min(tasks.values(), default=start)
        others = tuple(range(end + 1, last + 1))
        if vocab_size == _ENGLISH_VOCABULARY:
            return cls(start, end, {}, {}, last, others)
        names = {i: name for name, i in ids.items()}
        languages = {names[i]: i for i in range(start + 1, first_task) if i in names}
        return cls(start, end, languages, tasks, last, others)


class TimeState(NamedTuple):
    """What a row has written: its last two tokens, the latest timestamp, and how many tokens.

    The tokens are told by their kind, as that is all that counts. Each is [b].
    """

    is_used: RowFlags
    num_tokens: Int32[Array, "b"]
    is_time: RowFlags  # the last token
    was_time: RowFlags  # the one before; true where there is none
    latest: Int32[Array, "b"]  # -1 before the first


def timestamp_processor(tokens: SpecialTokens, never_first: Sequence[int] = ()) -> Processor:
    """Returns the processor of requests that may write any token; `never_first` begin no text.

    Requests with `allowed_token_ids`, such as that for the language, are left alone.
    """
    first, end = tokens.first_time, tokens.end

    def is_used(settings: Any) -> bool:
        return settings.allowed_token_ids is None

    def init(settings: Any, *, prompt: Any, stop_ids: Any, vocab_size: int) -> TimeState:
        del prompt, stop_ids, vocab_size
        return TimeState(
            jnp.array(is_used(settings)), jnp.int32(0), jnp.array(False), jnp.array(True),
            jnp.int32(-1),
        )  # fmt: skip

    def apply(state: TimeState, logits: Float32[Array, "b v"]) -> Float32[Array, "b v"]:
        forbidden = _forbidden(state, logits.shape[-1], first, end, never_first)
        kept = jnp.where(forbidden, -jnp.inf, logits)
        # All timestamps together beside the likeliest other token.
        is_time = jnp.arange(logits.shape[-1]) >= first
        times = jax.nn.logsumexp(jnp.where(is_time, kept, -jnp.inf), axis=-1)
        best_text = jnp.max(jnp.where(is_time, -jnp.inf, kept), axis=-1)
        kept = jnp.where((times > best_text)[:, None] & ~is_time, -jnp.inf, kept)
        return jnp.where(state.is_used[:, None], kept, logits)

    def update(state: TimeState, token: RowTokens) -> TimeState:
        is_time = token >= first
        return TimeState(
            state.is_used,
            state.num_tokens + 1,
            is_time,
            state.is_time | (state.num_tokens == 0),
            jnp.where(is_time, token - first, state.latest),
        )

    return Processor("timestamps", is_used, init, apply, update)


def _forbidden(
    state: TimeState, vocab_size: int, first: int, end: int, never_first: Sequence[int]
) -> Bool[Array, "b v"]:
    """Returns which tokens may not follow."""
    ids = jnp.arange(vocab_size)
    is_time, is_text = ids >= first, ids < end
    time = ids - first
    is_begin = (state.num_tokens == 0)[:, None]
    is_last, was = state.is_time[:, None], state.was_time[:, None]
    # After a pair text follows, after a single one its second or the end.
    forbidden = is_last & jnp.where(was, is_time, is_text)
    # A segment may not end where it begins; the second of a pair repeats the first.
    latest = state.latest[:, None]
    least = jnp.where(is_last & ~was | (latest < 0), latest, latest + 1)
    forbidden |= is_time & (time < least)
    starts_badly = ~is_time | (time > _FIRST_AT_MOST)
    blank = np.zeros(vocab_size, bool)
    blank[[i for i in never_first if i < vocab_size]] = True
    return forbidden | (is_begin & (starts_badly | blank)) | (ids == first - 1)

"""What drafters remember, and what several of them share.

A drafter remembers nothing (`Drafter`), the text (`Remembering`, in a `History`), or the target's
last output (`ReadingLastOutput`). A cache of its own catches up with the text in few calls of fixed
widths (`read_on`). A drafter that called the target hands its cache on (`hand_on`).
"""

import functools
from collections.abc import Callable
from typing import Any, Self

import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from jspec.common.typing import BlockFlags, DraftTokens, Params, RowCounts, RowTokens, Tokens
from jspec.kernels import while_any
from jspec.models import DecoderConfig, KVCache, init_cache
from jspec.models.layers import look_up, normed_outputs
from jspec.speculation.types import Drafter, SourceView, TargetPrefix, TargetView

CATCH_UP_WIDTH = 64
_FEW = 8  # width of the calls that read the last tokens, twice as many at most


class History(struct.PyTreeNode):
    """The committed tokens of every row, for drafters that look back at them.

    Attributes:
      tokens: [b s]; those from `length` on are meaningless.
      length: committed tokens, [b].
    """

    tokens: Int32[Array, "b s"]
    length: RowCounts

    @classmethod
    def init(cls, batch_size: int, capacity: int) -> Self:
        """Returns empty texts with room for `capacity` tokens."""
        tokens = jnp.zeros([batch_size, capacity], jnp.int32)
        return cls(tokens, length=jnp.zeros([batch_size], jnp.int32))

    def append(self, tokens: Tokens, valid: BlockFlags) -> Self:
        """Adds the valid tokens of each row, which come first in it."""
        rows = jnp.arange(tokens.shape[0])[:, None]
        slots = self.length[:, None] + jnp.arange(tokens.shape[1])
        slots = jnp.where(valid, slots, self.tokens.shape[1])  # past the end: dropped
        return self.replace(
            tokens=self.tokens.at[rows, slots].set(tokens, mode="drop"),
            length=self.length + valid.sum(axis=1, dtype=jnp.int32),
        )

    def append_one(self, token: RowTokens) -> Self:
        """Adds one token to each row, [b]."""
        return self.append(token[:, None], jnp.ones_like(token, bool)[:, None])

    def window(self, start: RowCounts, width: int) -> Tokens:
        """Returns `width` tokens of each row, beginning at `start`."""
        slots = start[:, None] + jnp.arange(width)
        # Clipped and not masked: callers ignore what lies past the length.
        return jnp.take_along_axis(self.tokens, slots, axis=1, mode="clip")

    def newest(self) -> RowTokens:
        """Returns the last committed token of each row."""
        # An empty row has no newest token and gets whatever is in slot 0.
        return self.window(jnp.maximum(self.length - 1, 0), 1)[:, 0]


class Remembering(Drafter):
    """A drafter whose state is the text.

    Of an encoder-decoder that is the source, then the answer.
    """

    can_roll_back = True

    def init(self, batch_size: int, capacity: int) -> History:
        """Returns the state of rows that have seen nothing."""
        return History.init(batch_size, capacity)

    def observe(
        self, params: Params, state: History, tokens: Tokens, hidden: Array, valid: BlockFlags
    ) -> History:
        """Remembers committed tokens."""
        return state.append(tokens, valid)

    def read_source(self, params: Params, state: History, source: SourceView) -> History:
        """Remembers the tokens of a text: summaries, translations and corrections copy from it."""
        if source.inputs.ndim > 2:  # sound
            return state
        valid = jnp.arange(source.inputs.shape[1]) < source.length[:, None]
        return state.append(source.inputs, valid)


class ReadingLastOutput(Drafter):
    """A drafter whose state is the output of the target's last layer, before the norm, [b d].

    It has no cache and nothing to catch up on: every committed token brings its output along.
    """

    target: DecoderConfig
    can_roll_back = True  # the next token that is read brings its own output

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The target's last layer."""
        # Number 0 is the embedding, so the last layer has the number of layers.
        return (self.target.num_layers,)

    def init(self, batch_size: int, capacity: int) -> Float32[Array, "b d"]:
        """Returns the state of rows that have seen nothing."""
        return jnp.zeros([batch_size, self.target.embed_dim], jnp.float32)

    def observe(
        self, params: Params, state: Array, tokens: Tokens, hidden: Array, valid: BlockFlags
    ) -> Float32[Array, "b d"]:
        """Keeps the output [b t 1 d] at the last valid token; without one a row keeps its state."""
        num_valid = valid.sum(axis=1, dtype=jnp.int32)
        # A row without valid tokens reads any output, which is not kept.
        index = jnp.maximum(num_valid - 1, 0)[:, None, None]
        newest = jnp.take_along_axis(hidden[:, :, 0], index, axis=1)[:, 0]
        return jnp.where(num_valid[:, None] > 0, newest.astype(jnp.float32), state)

    def read(self, target_params: Any, state: Float32[Array, "b d"]) -> Float[Array, "b 1 d"]:
        """Returns what the target's own head reads at that token."""
        # The norm is applied once a round here, not at every committed token.
        return normed_outputs(self.target, target_params, state[:, None])


def hand_on(view: TargetView, last_token: RowTokens, drafts: DraftTokens) -> TargetPrefix:
    """Returns a verify call on [last token, drafts] before its first layer.

    The view's cache is as the drafters have left it.
    """
    # The cache that came out of a drafter's call goes on to the verify call: if the one from before
    # were used again, XLA would copy it in every round. What the drafter wrote after the committed
    # slots does no harm, as the verify call writes its block over it.
    block = jnp.concatenate([last_token[:, None], drafts], axis=1)
    hidden = look_up(view.params["embedding"], block).astype(jnp.float32)
    # 0: the verify call begins at the first layer, with the block embedded.
    return TargetPrefix(hidden, view.cache, 0)


def read_on(
    call: Callable[..., Any],
    cache: KVCache,
    goal: RowCounts,
    window: Callable[[RowCounts, int], Tokens],
) -> KVCache:
    """Feeds tokens until at least `goal` slots of each row are committed.

    `call` is the model with its parameters; `window` returns tokens of each row from a slot on.
    """

    def missing(cache: KVCache) -> RowCounts:
        return jnp.maximum(goal - cache.length, 0)

    def feed(width: int, cache: KVCache) -> KVCache:
        tokens = window(cache.length, width)
        _, _, fed = call(tokens, cache, logits_at=jnp.zeros_like(goal))
        return fed.commit(jnp.minimum(missing(cache), width))

    for width, most_left in ((CATCH_UP_WIDTH, 2 * _FEW), (_FEW, 0)):
        cache = while_any(
            lambda cache, most_left=most_left: missing(cache) > most_left,
            functools.partial(feed, width),
            cache,
        )
    return cache


def tokens_read(missing: RowCounts) -> RowCounts:
    """Returns the tokens in the calls by which `read_on` reads what is missing."""
    num_wide = -(-jnp.maximum(missing - 2 * _FEW, 0) // CATCH_UP_WIDTH)
    wide = num_wide * CATCH_UP_WIDTH
    return wide + -(-jnp.maximum(missing - wide, 0) // _FEW) * _FEW


def empty_caches(config: DecoderConfig, dtype: DTypeLike) -> Callable[[int, int], KVCache]:
    """Returns a function of batch size and capacity that makes a model's empty cache."""
    return lambda batch_size, capacity: init_cache(
        config, batch_size=batch_size, capacity=capacity, dtype=dtype
    )

"""Where each random number of a request comes from.

A number is a function of the request's seed, of what it decides and of a position. It never depends
on the batch, on how many rounds the host runs at a time, or on a key that is split along the way.

*Plain decoding* keys its noise by the absolute position of the token that it draws.
`INDEPENDENT` noise is for rules that draw draft and target apart, such as `rejection`. A round keys
it by the position of the round's *first* token and the offset in the round. It must not be keyed by
absolute position: after a rejection the same positions come round again, and noise that has already
decided one acceptance would decide another. Under `block` that is biased from the second round on.

`SHARED` noise is plain decoding's noise, given to draft and target alike (arXiv 2408.07978). It may
be keyed by absolute position, because a position's noise decides one thing only: the token that the
target draws there.
"""

import enum
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Key

from jspec import kernels
from jspec.common.typing import RowCounts, RowSeeds

KEY_TYPE = "threefry2x32"  # with other generators a row's numbers depend on the batch's shape


class AcceptanceNoise(struct.PyTreeNode):
    """The randomness of one round's acceptance.

    Attributes:
      uniforms: one in [0, 1) for each draft, [b w]; None under shared noise.
      gumbel: standard Gumbel noise for the next token, [b v]; under shared noise for every position
        of the round, [b w+1 v].
    """

    uniforms: Float32[Array, "b w"] | None
    gumbel: Float32[Array, "b *w v"]


@enum.unique
class Purpose(enum.IntEnum):
    """What a random number decides."""

    PLAIN = 0
    DRAFT = 1
    ACCEPT = 2
    NEXT = 3


def round_keys(
    seed: RowSeeds, position: RowCounts, purpose: Purpose, num_offsets: int
) -> Key[Array, "b w"]:
    """Returns one key for each row and offset of a round.

    Positions are those of the round's first token, counted from the start of the prompt. Different
    purposes have unrelated numbers.
    """

    def one_key(seed: Array, position: Array, offset: Array) -> Key[Array, ""]:
        key = jax.random.key(seed, impl=KEY_TYPE)
        numbers = jnp.stack([jnp.int32(purpose), position, offset])
        return jax.lax.scan(fold, key, numbers, unroll=unroll)[0]

    def fold(key: Key[Array, ""], number: Array) -> tuple[Key[Array, ""], None]:
        return jax.random.fold_in(key, number), None

    unroll = kernels.prefers_unrolled_loops()
    offsets = jnp.arange(num_offsets, dtype=jnp.int32)
    return jax.vmap(jax.vmap(one_key, (None, None, 0)), (0, 0, None))(seed, position, offsets)


def gumbel_noise(
    keys: Key[Array, "b"], vocab_size: int, is_random: Bool[Array, ""]
) -> Float32[Array, "b v"]:
    """Returns standard Gumbel noise for one draw a row; the keys are consumed.

    Unless `is_random`, that is where all temperatures are 0, it is zeros, which spares the work.
    """

    def draw(keys: Key[Array, "b"]) -> Float32[Array, "b v"]:
        # mode="low" makes its noise of 23-bit uniforms, which cuts off the upper tail: a token less
        # likely than about 1e-7 would never be drawn.
        one_row = functools.partial(
            jax.random.gumbel, shape=[vocab_size], dtype=jnp.float32, mode="high"
        )
        return jax.vmap(one_row)(keys)

    def skip(keys: Key[Array, "b"]) -> Float32[Array, "b v"]:
        return jnp.zeros([keys.shape[0], vocab_size], jnp.float32)

    return jax.lax.cond(is_random, draw, skip, keys)


def plain_noise(
    seed: RowSeeds, position: RowCounts, vocab_size: int, is_random: Bool[Array, ""]
) -> Float32[Array, "b v"]:
    """Returns the noise that draws the token at an absolute position in plain decoding."""
    return gumbel_noise(absolute_keys(seed, position, 1)[:, 0], vocab_size, is_random)


def absolute_keys(seed: RowSeeds, position: RowCounts, width: int) -> Key[Array, "b w"]:
    """Returns the keys with which plain decoding draws at `width` positions from this one on."""
    keys = [round_keys(seed, position + i, Purpose.PLAIN, 1) for i in range(width)]
    return jnp.concatenate(keys, axis=1)


def shared_noise(
    seed: RowSeeds, position: RowCounts, width: int, vocab_size: int, is_random: Bool[Array, ""]
) -> AcceptanceNoise:
    """Returns plain decoding's noise for every position of a round of `width` drafts, [b w+1 v]."""
    keys = absolute_keys(seed, position, width + 1)
    gumbel = gumbel_noise(keys.reshape(-1), vocab_size, is_random)
    return AcceptanceNoise(None, gumbel.reshape(*keys.shape, vocab_size))


def independent_draft_keys(seed: RowSeeds, position: RowCounts, width: int) -> Key[Array, "b w"]:
    """Returns a drafter's own keys for one round; see `round_keys`."""
    return round_keys(seed, position, Purpose.DRAFT, width)


def acceptance_noise(
    seed: RowSeeds, position: RowCounts, width: int, vocab_size: int, is_random: Bool[Array, ""]
) -> AcceptanceNoise:
    """Returns independent noise for a round: [b w] for its drafts, [b v] for the next token."""
    keys = round_keys(seed, position, Purpose.ACCEPT, width)
    uniforms = jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, [], jnp.float32)))(keys)
    next_keys = round_keys(seed, position, Purpose.NEXT, 1)[:, 0]
    return AcceptanceNoise(uniforms, gumbel_noise(next_keys, vocab_size, is_random))


class RoundNoise(NamedTuple):
    """Where a rule's randomness comes from.

    Attributes:
      draft_keys: (seed [b], position [b], w) -> [b w], the keys with which a drafter draws.
      acceptance: (seed [b], position [b], w, vocabulary size, is_random) -> the noise with which
        the rule decides.
      is_shared: whether draft and target draw with the same noise, that of absolute positions.
    """

    draft_keys: Callable[[RowSeeds, RowCounts, int], Key[Array, "b w"]]
    acceptance: Callable[[RowSeeds, RowCounts, int, int, Bool[Array, ""]], AcceptanceNoise]
    is_shared: bool = False


INDEPENDENT = RoundNoise(independent_draft_keys, acceptance_noise)
SHARED = RoundNoise(absolute_keys, shared_noise, is_shared=True)

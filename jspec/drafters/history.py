"""The committed tokens of every row, for drafters that look back at them."""

from typing import Self

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int32

from jspec.common.typing import RowCounts, RowTokens, Tokens


class History(struct.PyTreeNode):
    """A growing text a row.

    Attributes:
      tokens: [b s]; what lies behind `length` is meaningless.
      length: committed tokens, [b].
    """

    tokens: Int32[Array, "b s"]
    length: RowCounts

    @classmethod
    def init(cls, batch_size: int, capacity: int) -> Self:
        """Returns empty texts with room for `capacity` tokens."""
        return cls(
            tokens=jnp.zeros([batch_size, capacity], jnp.int32),
            length=jnp.zeros([batch_size], jnp.int32),
        )

    def append(self, tokens: Tokens, valid: Bool[Array, "b t"]) -> Self:
        """Adds the first so many tokens of each row that are valid."""
        rows = jnp.arange(tokens.shape[0])[:, None]
        slots = self.length[:, None] + jnp.arange(tokens.shape[1])
        slots = jnp.where(valid, slots, self.tokens.shape[1])  # past the end: dropped
        return self.replace(
            tokens=self.tokens.at[rows, slots].set(tokens, mode="drop"),
            length=self.length + valid.sum(axis=1, dtype=jnp.int32),
        )

    def window(self, start: RowCounts, width: int) -> Tokens:
        """Returns `width` tokens a row from `start` on."""
        slots = start[:, None] + jnp.arange(width)
        return jnp.take_along_axis(self.tokens, slots, axis=1, mode="clip")

    def newest(self) -> RowTokens:
        """Returns the last committed token of each row."""
        return self.window(jnp.maximum(self.length - 1, 0), 1)[:, 0]

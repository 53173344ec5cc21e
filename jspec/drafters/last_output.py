"""The target's last output at the newest committed token, for heads that draft from it alone."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from jspec.common.typing import Params, Tokens
from jspec.models import LlamaConfig
from jspec.models.outputs import normed_outputs


class ReadingLastOutput:
    """A drafter whose state is the output of the target's last layer, before the norm, [b d].

    It has no cache, and nothing to catch up on: every token that is committed brings its output.

    Attributes:
      target: the target's shape.
    """

    target: LlamaConfig

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The target's last layer."""
        return (self.target.num_layers,)

    def init(self, batch_size: int, capacity: int) -> Float32[Array, "b d"]:
        """Returns the state of rows that have seen nothing."""
        del capacity
        return jnp.zeros([batch_size, self.target.embed_dim], jnp.float32)

    def observe(
        self,
        params: Params,
        state: Float32[Array, "b d"],
        tokens: Tokens,
        hidden: Float[Array, "b t 1 d"],
        valid: Bool[Array, "b t"],
    ) -> Float32[Array, "b d"]:
        """Keeps the output at the last valid token; that of a row without any stays."""
        del params, tokens
        num_valid = valid.sum(axis=1, dtype=jnp.int32)
        index = jnp.maximum(num_valid - 1, 0)[:, None, None]
        newest = jnp.take_along_axis(hidden[:, :, 0], index, axis=1)[:, 0]
        return jnp.where(num_valid[:, None] > 0, newest.astype(jnp.float32), state)

    def read(self, target_params: Any, state: Float32[Array, "b d"]) -> Float32[Array, "b 1 d"]:
        """Returns what the target's own head reads at that token."""
        return normed_outputs(self.target, target_params, state[:, None])

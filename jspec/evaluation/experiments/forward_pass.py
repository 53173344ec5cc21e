"""A model over a given text, a chunk at a time, so that its logits [t v] stay small."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jspec.common.typing import Params
from jspec.models import KVCache, LlamaConfig, init_cache, make_apply


@dataclasses.dataclass(frozen=True)
class ForwardPass:
    """A model, or some of its layers.

    Attributes:
      config: the model's.
      params: its parameters.
      num_ids: ids that are used; the logits of those behind them are -inf.
      width: v, how many logits are wanted, at least as many.
      layers: those of its layers that are run, rising; None for all.
    """

    config: LlamaConfig
    params: Params
    num_ids: int
    width: int
    layers: tuple[int, ...] | None = None

    def start(self, capacity: int) -> KVCache:
        """Returns the cache before a text of at most so many tokens."""
        config = self.config
        if self.layers is not None:
            config = dataclasses.replace(config, num_layers=len(self.layers))
        dtype = self.params["embedding"].dtype
        return init_cache(config, batch_size=1, capacity=capacity, dtype=dtype)

    def logits(
        self, cache: KVCache, tokens: Int32[Array, "t"]
    ) -> tuple[Float32[Array, "t v"], KVCache]:
        """Returns the logits after each token, and the cache with all of them.

        Args:
          cache: of the tokens before; consumed.
          tokens: the next chunk.
        """
        return _run(
            self.params,
            cache,
            tokens,
            config=self.config,
            layers=self.layers,
            num_ids=self.num_ids,
            width=self.width,
        )


# Shared by all texts, drafters and settings: what compiles anew is a model, a capacity, a width.
@functools.partial(
    jax.jit, static_argnames=("config", "layers", "num_ids", "width"), donate_argnames="cache"
)
def _run(
    params: Params,
    cache: KVCache,
    tokens: Int32[Array, "t"],
    *,
    config: LlamaConfig,
    layers: tuple[int, ...] | None,
    num_ids: int,
    width: int,
) -> tuple[Float32[Array, "t v"], KVCache]:
    logits, _, cache = make_apply(config, layers)(params, tokens[None], cache)
    cache = cache.commit(jnp.array([tokens.shape[0]], jnp.int32))
    return widen(logits[0, :, :num_ids], width), cache


def widen(logits: Float32[Array, "t u"], width: int) -> Float32[Array, "t v"]:
    """Returns logits of more ids: those that were not there are never drawn."""
    padding = ((0, 0), (0, width - logits.shape[1]))
    return jnp.pad(logits, padding, constant_values=-jnp.inf)

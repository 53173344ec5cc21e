"""Grouped-query attention (arXiv 2305.13245) over the KV cache."""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float32

from jspec.models.cache import KVCache
from jspec.models.config import LlamaConfig
from jspec.models.layers import kernel_param, linear
from jspec.models.rope import apply_rope


class Attention(nn.Module):
    """One layer's attention. Keys and values live in the cache alone.

    The kernel `qkv` [k g+2 h i], i the width of the inputs, holds, for each key/value head, its g
    query heads, its key head and its value head, so that the heads can be split over devices by its
    first axis.

    Attributes:
      config: the model's.
      layer: which layer of the cache is read and written.
    """

    config: LlamaConfig
    layer: int

    @nn.compact
    def __call__(
        self,
        inputs: Float32[Array, "b t i"],
        rope: tuple[Float32[Array, "b t half"], Float32[Array, "b t half"]],
        visible: Bool[Array, "b t s"],
        cache: KVCache,
        block_offset: int,
    ) -> tuple[Float32[Array, "b t d"], KVCache]:
        """Writes the block's keys and values, then attends to what is visible."""
        cfg = self.config
        k, g, h, d = cfg.num_kv_heads, cfg.num_groups, cfg.head_dim, cfg.embed_dim
        b, t = inputs.shape[:2]
        qkv = linear(inputs, kernel_param(self, "qkv", (k, g + 2, h, inputs.shape[-1])))
        if cfg.attention_bias:
            qkv += self.param("qkv_bias", nn.initializers.zeros, (k, g + 2, h))
        rotated = apply_rope(qkv[:, :, :, : g + 1].reshape(b, t, k * (g + 1), h), *rope)
        rotated = rotated.reshape(b, t, k, g + 1, h)
        queries = rotated[:, :, :, :g].reshape(b, t, k * g, h) * h**-0.5
        cache = cache.write(self.layer, rotated[:, :, :, g], qkv[:, :, :, g + 1], block_offset)
        mixed = cache.attend(self.layer, queries, visible)
        outputs = linear(
            mixed.reshape(b, t, k, g, h), kernel_param(self, "out", (d, k, g, h)), num_contracted=3
        )
        if cfg.attention_bias:
            outputs += self.param("out_bias", nn.initializers.zeros, (d,))
        return outputs.astype(jnp.float32), cache

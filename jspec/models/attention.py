"""Grouped-query attention (arXiv 2305.13245) over the KV cache."""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float32

from jspec.kernels import rotate_heads
from jspec.models.cache import KVCache
from jspec.models.config import DecoderConfig
from jspec.models.layers import kernel_param, linear


class Attention(nn.Module):
    """The attention of one layer, whose keys and values live in a one-layer cache.

    For each key/value head, the kernel `qkv` [k g+2 h i] holds its g query heads, its key head and
    its value head; i is the width of the inputs. So the heads can be split over devices by the
    first axis.
    """

    config: DecoderConfig

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
        queries, keys, values = rotate_heads(qkv, *rope)
        # Written before they are read: a token finds itself and its block's others in the cache.
        cache = cache.write(keys, values, block_offset)
        mixed = cache.attend(queries, visible)
        outputs = linear(
            mixed.reshape(b, t, k, g, h), kernel_param(self, "out", (d, k, g, h)), num_contracted=3
        )
        if cfg.attention_bias:
            outputs += self.param("out_bias", nn.initializers.zeros, (d,))
        return outputs.astype(jnp.float32), cache

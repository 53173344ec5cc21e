"""Grouped-query attention (arXiv 2305.13245) over the KV cache."""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float32

from jspec.kernels import rotate_heads
from jspec.models.cache import KVCache
from jspec.models.config import DecoderConfig
from jspec.models.layers import RMSNorm, kernel_param, linear


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
        if cfg.qkv_bias:
            qkv += self.param("qkv_bias", nn.initializers.zeros, (k, g + 2, h))
        if cfg.qk_norm is not None:
            qkv = self._norm_heads(qkv)
        queries, keys, values = rotate_heads(qkv, *rope)
        if cfg.attention_scale is not None:
            queries *= cfg.attention_scale * h**0.5  # they are scaled by h^-1/2 already
        # Written before they are read: a token finds itself and its block's others in the cache.
        cache = cache.write(keys, values, block_offset)
        mixed = cache.attend(queries, visible, cfg.attention_softcap)
        # A matrix, in the order k, g, h of its inputs. Four axes a TPU would lay out in memory
        # otherwise, and copy the kernel for a product.
        outputs = linear(mixed.reshape(b, t, -1), kernel_param(self, "out", (d, k * g * h)))
        if cfg.out_bias:
            outputs += self.param("out_bias", nn.initializers.zeros, (d,))
        return outputs.astype(jnp.float32), cache

    def _norm_heads(self, qkv: Float32[Array, "b t k p h"]) -> Float32[Array, "b t k p h"]:
        """Norms query and key heads, each head apart or all of a token together."""
        b, t = qkv.shape[:2]
        # Before the rotation: a norm of all heads together does not commute with it.

        def norm(name: str, heads: Array) -> Array:
            flat = (b, -1, self.config.head_dim) if self.config.qk_norm == "head" else (b, t, -1)
            module = RMSNorm(self.config.norm_epsilon, name=name)
            return module(heads.reshape(flat)).reshape(heads.shape)

        parts = qkv[:, :, :, :-2], qkv[:, :, :, -2:-1], qkv[:, :, :, -1:]
        queries, keys = norm("query_norm", parts[0]), norm("key_norm", parts[1])
        return jnp.concatenate([queries, keys, parts[2]], axis=3)

"""The sparse feed-forward layer: a router, and a SwiGLU layer for each of many experts.

Mixtral (arXiv 2401.04088) and Qwen3-MoE (arXiv 2505.09388). Each token goes through the experts to
which the router gives the largest probabilities, and their outputs are added with these weights.
Mixtral divides the weights by their sum; Qwen3-MoE does where its config says so.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float32, Int

from jspec import kernels
from jspec.models.config import DecoderConfig
from jspec.models.layers import kernel_param


class Experts(nn.Module):
    """The sparse feed-forward layer. Its kernels are those of `FeedForward` with an axis before.

    ```
      router   [e d]       gate_up [e 2 f d]       down [e d f]
    ```
    """

    config: DecoderConfig

    @nn.compact
    def __call__(self, inputs: Float32[Array, "b t d"]) -> Float32[Array, "b t d"]:
        """Applies to every token the experts that the router chooses for it."""
        cfg, init = self.config, nn.initializers.normal(0.02)
        experts, width = cfg.num_experts, cfg.expert_dim
        router = self.param("router", init, (experts, cfg.embed_dim))
        gate_up = self.param("experts_gate_up", init, (experts, 2, width, cfg.embed_dim))
        down = kernel_param(self, "experts_down", (experts, cfg.embed_dim, width))
        rows = inputs.reshape(-1, cfg.embed_dim)
        weights, chosen = route(cfg, kernels.product(rows, router.astype(jnp.float32)))
        # Grouped by expert, each kernel is read once for all tokens that chose it. The sort is
        # stable, and a token's results are added below in an order of its own, so they do not
        # depend on the other tokens.
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        sizes = jnp.bincount(chosen.reshape(-1), length=experts).astype(jnp.int32)
        sorted_rows = rows[order // cfg.num_experts_per_token]
        hidden = kernels.grouped_product(
            sorted_rows, gate_up.reshape(experts, -1, cfg.embed_dim), sizes
        )
        hidden = kernels.swiglu(hidden.reshape(1, -1, 2, width))[0]
        results = kernels.grouped_product(hidden, down, sizes)
        results = jnp.zeros_like(results).at[order].set(results, unique_indices=True)
        results = results.reshape(*weights.shape, cfg.embed_dim)
        return jnp.sum(results * weights[..., None], axis=1).reshape(inputs.shape)


def route(
    config: DecoderConfig, logits: Float32[Array, "r e"]
) -> tuple[Float32[Array, "r k"], Int[Array, "r k"]]:
    """Returns the weights and the numbers of each token's experts, the most probable first.

    Of equal probabilities the lower number is first. All of it is float32, as in transformers: a
    rounded probability may choose another expert.
    """
    probs = jax.nn.softmax(logits, axis=-1)
    weights, chosen = jax.lax.top_k(probs, config.num_experts_per_token)
    if config.normalize_expert_weights:
        weights /= jnp.sum(weights, axis=-1, keepdims=True)
    return weights, chosen

"""The small parts of a Llama: products, RMSNorm, the SwiGLU feed-forward layer."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from jspec.models.config import LlamaConfig


def linear(
    inputs: Float[Array, "b t *in"], kernel: Float[Array, "..."], num_contracted: int = 1
) -> Float32[Array, "b t *out"]:
    """Returns inputs · kernelᵀ, accumulated in float32.

    Args:
      inputs: [b t] and then `num_contracted` axes.
      kernel: the output axes and then the same `num_contracted` axes: rows are outputs, as in
        PyTorch, which is the faster layout for few rows.
      num_contracted: how many trailing axes are summed over.

    Returns:
      [b t] and then the kernel's output axes, float32.
    """
    b, t = inputs.shape[:2]
    out_axes = kernel.shape[:-num_contracted]
    rows = inputs.astype(kernel.dtype).reshape(b * t, -1)
    kernel = kernel.reshape(-1, rows.shape[1])
    outputs = jax.lax.dot_general(
        _at_least_two_rows(rows),
        kernel,
        (((1,), (1,)), ((), ())),
        precision=exact_float32(kernel.dtype),
        preferred_element_type=jnp.float32,
    )
    return outputs[: b * t].reshape(b, t, *out_axes)


def exact_float32(dtype: DTypeLike) -> jax.lax.Precision | None:
    """Returns the precision of products of that type: float32 means float32, not a GPU's TF32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _at_least_two_rows(rows: Float[Array, "r in"]) -> Float[Array, "r2 in"]:
    """Pads one bfloat16 row to two: XLA on CPU is ten times slower with one."""
    if rows.shape[0] > 1 or rows.dtype != jnp.bfloat16 or jax.default_backend() != "cpu":
        return rows
    return jnp.concatenate([rows, jnp.zeros_like(rows)])


def look_up(table: Float[Array, "v d"], ids: Int[Array, "b t"]) -> Float[Array, "b t d"]:
    """Returns the rows of a table.

    XLA on CPU gathers bfloat16 in float32, and moves the conversion of the whole table out of the
    decoding loop, where it lives as a second copy. Behind the barrier the table depends on the ids:
    only the rows are converted.
    """
    table, ids = jax.lax.optimization_barrier((table, ids))
    return table[ids]


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (arXiv 1910.07467), in float32.

    Attributes:
      epsilon: added to the mean square.
    """

    epsilon: float

    @nn.compact
    def __call__(self, inputs: Float32[Array, "b t d"]) -> Float32[Array, "b t d"]:
        """Normalises the last axis and scales it."""
        scale = self.param("scale", nn.initializers.ones, (inputs.shape[-1],))
        mean_square = jnp.mean(jnp.square(inputs), axis=-1, keepdims=True)
        return inputs * jax.lax.rsqrt(mean_square + self.epsilon) * scale.astype(jnp.float32)


class FeedForward(nn.Module):
    """The SwiGLU layer (arXiv 2002.05202): down(silu(gate(x)) * up(x)).

    Attributes:
      config: the model's.
    """

    config: LlamaConfig

    @nn.compact
    def __call__(self, inputs: Float32[Array, "b t d"]) -> Float32[Array, "b t d"]:
        """Applies the layer to every token."""
        cfg = self.config
        init = nn.initializers.normal(0.02)
        gate_up = linear(inputs, self.param("gate_up", init, (2, cfg.hidden_dim, cfg.embed_dim)))
        if cfg.mlp_bias:
            gate_up += self.param("gate_up_bias", nn.initializers.zeros, (2, cfg.hidden_dim))
        hidden = jax.nn.silu(gate_up[:, :, 0]) * gate_up[:, :, 1]
        outputs = linear(hidden, self.param("down", init, (cfg.embed_dim, cfg.hidden_dim)))
        if cfg.mlp_bias:
            outputs += self.param("down_bias", nn.initializers.zeros, (cfg.embed_dim,))
        return outputs

"""The small parts of the decoder: linear layers, RMSNorm, the feed-forward layer, head."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Float32, Int

from jspec import kernels
from jspec.common.typing import Params
from jspec.kernels import CompactKernel, Kernel, SplitKernel
from jspec.models.config import DecoderConfig


def kernel_param(module: nn.Module, name: str, shape: tuple[int, ...]) -> Kernel:
    """Returns a module's kernel of that shape, a float array or a compact one.

    Raises:
      ValueError: the compact kernel has another shape.
    """
    kernel = module.get_variable("params", name)
    # Flax compares a parameter leaf by leaf with what its initialiser gives, which is one float
    # array. A compact kernel has other leaves, so its shape is compared here.
    if not isinstance(kernel, CompactKernel | SplitKernel):
        return module.param(name, nn.initializers.normal(0.02), shape)
    if kernel.shape != shape:
        raise ValueError(f"expected {name} of shape {shape}, got {kernel.shape}")
    return kernel


def linear(inputs: Float[Array, "b t i"], kernel: Kernel) -> Float32[Array, "b t *out"]:
    """Returns inputs · kernelᵀ, summed in float32; see `kernels.product`.

    The kernel [*out i] may have several axes of outputs.
    """
    b, t, num_inputs = inputs.shape
    out_axes = kernel.shape[:-1]
    # The others are stored as matrices already.
    if not isinstance(kernel, CompactKernel | SplitKernel):
        kernel = kernel.reshape(-1, num_inputs)
    return kernels.product(inputs.reshape(b * t, -1), kernel).reshape(b, t, *out_axes)


def look_up(table: Kernel, ids: Int[Array, "b t"]) -> Float[Array, "b t d"]:
    """Returns the rows of a table [v d], in its type; those of a compact table in float32."""
    # XLA on CPU gathers bfloat16 in float32. It would move the conversion of the whole table out of
    # the decoding loop, where it lives as a second copy. After this barrier the table depends on
    # the ids, and only the rows are converted.
    table, ids = jax.lax.optimization_barrier((table, ids))
    return kernels.table_rows(table, ids)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (arXiv 1910.07467), in float32; see `kernels.rms_norm`."""

    epsilon: float

    @nn.compact
    def __call__(self, inputs: Float32[Array, "b t d"]) -> Float32[Array, "b t d"]:
        """Normalises the last axis and scales it."""
        scale = self.param("scale", nn.initializers.ones, (inputs.shape[-1],))
        return kernels.rms_norm(inputs, scale, jnp.float32(self.epsilon))


_GATES = {"silu": kernels.swiglu, "gelu_tanh": kernels.geglu}


class FeedForward(nn.Module):
    """The gated layer (arXiv 2002.05202): down(act(gate(x)) * up(x)), SwiGLU or GeGLU."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, inputs: Float32[Array, "b t d"]) -> Float32[Array, "b t d"]:
        """Applies the layer to every token."""
        cfg = self.config
        # One product for gate and up: they read the same rows.
        gate_up = kernel_param(self, "gate_up", (2, cfg.hidden_dim, cfg.embed_dim))
        gate_up = linear(inputs, gate_up)
        if cfg.mlp_bias:
            gate_up += self.param("gate_up_bias", nn.initializers.zeros, (2, cfg.hidden_dim))
        down = kernel_param(self, "down", (cfg.embed_dim, cfg.hidden_dim))
        gated = _GATES[cfg.activation](gate_up)
        outputs = linear(gated, down)
        if cfg.mlp_bias:
            outputs += self.param("down_bias", nn.initializers.zeros, (cfg.embed_dim,))
        return outputs


def normed_outputs(
    config: DecoderConfig, params: Params, outputs: Float[Array, "b t d"]
) -> Float32[Array, "b t d"]:
    """Returns the last layer's outputs normed, as a model's head reads them."""
    norm = RMSNorm(config.norm_epsilon)
    return norm.apply({"params": params["final_norm"]}, outputs)  # type: ignore[return-value]


def softcap(values: Float32[Array, "..."], cap: float | None) -> Float32[Array, "..."]:
    """Returns cap · tanh(values / cap), which stays below the cap (arXiv 2408.00118)."""
    return values if cap is None else cap * jnp.tanh(values / cap)


def scaled(values: Float[Array, "..."], scale: float) -> Float[Array, "..."]:
    """Returns values · scale; those of most models are 1, and cost nothing."""
    return values if scale == 1.0 else values * scale


def finish_logits(config: DecoderConfig, logits: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Returns what the head's product becomes: scaled and capped, where a model does that."""
    # Both keep the order of the logits, but not their distribution.
    return softcap(scaled(logits, config.logits_scale), config.logits_softcap)


def head_kernel(config: DecoderConfig, params: Params) -> Kernel:
    """Returns a model's head, [v d]; where the two are tied, that is its embedding."""
    return params["embedding" if config.tie_embeddings else "head"]


def head_of_ids(config: DecoderConfig, params: Params, ids: Int[np.ndarray, "u"]) -> Kernel:
    """Returns a model's head over those ids only, [u d]: a copy."""
    return kernels.take_rows(head_kernel(config, params), ids)

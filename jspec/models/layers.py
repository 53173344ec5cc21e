"""The parts of a decoder: linear layers, norms, feed-forward, rotary angles, attention, head.

A sparse feed-forward layer has a router, and a SwiGLU layer for each of many experts: Mixtral
(arXiv 2401.04088) and Qwen3-MoE (arXiv 2505.09388). Each token goes through the experts to which
the router gives the largest probabilities, and their outputs are added with these weights. Mixtral
divides the weights by their sum; Qwen3-MoE does where its config says so.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Float32, Int

from jspec import kernels
from jspec.common.typing import Params
from jspec.kernels import CompactKernel, Kernel, SplitKernel, rotate_heads
from jspec.models.cache import KVCache
from jspec.models.config import DecoderConfig, RopeScaling


def kernel_param(module: nn.Module, name: str, shape: tuple[int, ...]) -> Kernel:
    """Returns a module's kernel of that shape, a float array or a compact kernel.

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
        # stable, and a token's results are added below in its own order, so they do not
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


def rope_frequencies(config: DecoderConfig, kind: str = "global") -> Float32[np.ndarray, "half"]:
    """Returns the angular frequency of each pair of dimensions, in radians a position.

    Rotary position embeddings (arXiv 2104.09864), scaled for longer contexts.

    `kind` is what `config.rope_of` says of a layer, and not "none".
    """
    # In NumPy, once when the program is traced: the frequencies are constants of the model.
    theta = config.local_rope_theta if kind == "local" else config.rope_theta
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = (1.0 / np.float32(theta) ** exponents).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None or kind == "local" or scaling.kind == "dynamic":
        return frequencies
    if scaling.kind == "linear":
        scaled = frequencies / scaling.factor
    elif scaling.kind == "longrope":
        scaled = frequencies / np.array(scaling.short_factors, np.float32)
    else:
        # High frequencies are kept, low ones divided by the factor, those in between blended.
        is_yarn = scaling.kind == "yarn"
        blend = _yarn_blend(config, scaling) if is_yarn else _llama3_blend(frequencies, scaling)
        scaled = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    return scaled.astype(np.float32)


def _llama3_blend(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Returns how much of each frequency is kept (arXiv 2407.21783)."""
    # Wavelengths, in tokens, are compared with the context before its extension: a short one has
    # made many turns in it and is well trained, a long one has not.
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = (scaling.original_max_seq_len / wavelengths - low) / (high - low)
    return np.clip(blend, 0.0, 1.0)


def _yarn_blend(config: DecoderConfig, scaling: RopeScaling) -> np.ndarray:
    """Returns how much of each frequency is kept (arXiv 2309.00071): a ramp over dimensions."""

    def dimension(turns: float) -> float:
        """Returns the pair of dimensions that turns this often in the original context."""
        wavelength = scaling.original_max_seq_len / (turns * 2 * math.pi)
        return config.head_dim * math.log(wavelength) / (2 * math.log(config.rope_theta))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), config.head_dim - 1)
    ramp = (np.arange(config.head_dim // 2, dtype=np.float32) - low) / max(high - low, 1e-3)
    return 1 - np.clip(ramp, 0.0, 1.0)


def rope_cos_sin(
    config: DecoderConfig, positions: Int[Array, "b t"], kind: str = "global"
) -> tuple[Float32[Array, "b t half"], Float32[Array, "b t half"]]:
    """Returns cosines and sines of every position's angles; see `DecoderConfig.rope_of`."""
    if kind == "none":
        # An angle of 0 leaves a head as it is, so the layer needs no other code.
        still = jnp.ones((*positions.shape, config.head_dim // 2), jnp.float32)
        return still, jnp.zeros_like(still)
    # float32 whatever the model's type: bfloat16 cannot tell position 257 from 256.
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(config, kind)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    scaling = config.rope_scaling
    if kind == "local" or scaling is None or scaling.attention_factor == 1.0:
        return cos, sin
    return cos * scaling.attention_factor, sin * scaling.attention_factor


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245) of one layer, over a one-layer cache.

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

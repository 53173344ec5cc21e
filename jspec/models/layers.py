"""The small parts of a Llama: products, RMSNorm, the SwiGLU feed-forward layer."""

from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Float32, Int

from jspec import kernels
from jspec.kernels.precision import exact_float32
from jspec.kernels.quantized import QuantizedKernel, quantized_product, quantized_rows
from jspec.models.config import LlamaConfig

Kernel: TypeAlias = Float[Array, "..."] | QuantizedKernel

_FEW_ROWS = {jnp.dtype(jnp.bfloat16): 16, jnp.dtype(jnp.float32): 64}
_MANY_ROWS = 512
_NORM_SCALES = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)  # that C++ reads


def kernel_param(module: nn.Module, name: str, shape: tuple[int, ...]) -> Kernel:
    """Returns a module's kernel of that shape, a float array or a quantised one.

    Flax compares a parameter leaf by leaf with what its initialiser gives, and that is a float
    array: a quantised kernel is compared here.

    Raises:
      ValueError: the quantised kernel has another shape.
    """
    kernel = module.get_variable("params", name)
    if not isinstance(kernel, QuantizedKernel):
        return module.param(name, nn.initializers.normal(0.02), shape)
    if kernel.shape != shape:
        raise ValueError(f"expected {name} of shape {shape}, got {kernel.shape}")
    return kernel


def linear(
    inputs: Float[Array, "b t *in"], kernel: Kernel, num_contracted: int = 1
) -> Float32[Array, "b t *out"]:
    """Returns inputs · kernelᵀ, accumulated in float32.

    Args:
      inputs: [b t] and then `num_contracted` axes.
      kernel: the output axes and then the same `num_contracted` axes: rows are outputs, as in
        PyTorch, which is the faster layout for few rows. Or a quantised one of that shape.
      num_contracted: how many trailing axes are summed over.

    Returns:
      [b t] and then the kernel's output axes, float32.
    """
    b, t = inputs.shape[:2]
    out_axes = kernel.shape[:-num_contracted]
    rows = inputs.reshape(b * t, -1)
    if isinstance(kernel, QuantizedKernel):
        return quantized_product(rows, kernel).reshape(b, t, *out_axes)
    kernel = kernel.reshape(-1, rows.shape[1])
    if b * t <= most_native_rows(kernel.dtype) and kernels.is_available():
        result = jax.ShapeDtypeStruct((b * t, kernel.shape[0]), jnp.float32)
        outputs = kernels.call("product", _product, result, rows.astype(jnp.float32), kernel)
    else:
        outputs = _product(rows, kernel)
    return outputs.reshape(b, t, *out_axes)


def most_native_rows(dtype: jnp.dtype) -> int:
    """Returns up to how many rows a product on CPU is computed without XLA.

    That is faster, but for some float32 products near the limit, and more exact: XLA's float32
    logits are twice as far from float64. A row's result does not depend on the rows beside it.
    """
    if dtype == jnp.bfloat16 and kernels.has_pairs():
        return _MANY_ROWS
    return _FEW_ROWS.get(dtype, 0)


def _product(rows: Float[Array, "r in"], kernel: Float[Array, "out in"]) -> Float32[Array, "r out"]:
    """Returns rows, rounded to the kernel's type, · kernelᵀ by XLA."""
    outputs = jax.lax.dot_general(
        _at_least_two_rows(rows.astype(kernel.dtype)),
        kernel,
        (((1,), (1,)), ((), ())),
        precision=exact_float32(kernel.dtype),
        preferred_element_type=jnp.float32,
    )
    return outputs[: rows.shape[0]]


def _at_least_two_rows(rows: Float[Array, "r in"]) -> Float[Array, "r2 in"]:
    """Pads one bfloat16 row to two: XLA on CPU is ten times slower with one."""
    if rows.shape[0] > 1 or rows.dtype != jnp.bfloat16 or jax.default_backend() != "cpu":
        return rows
    return jnp.concatenate([rows, jnp.zeros_like(rows)])


def look_up(table: Kernel, ids: Int[Array, "b t"]) -> Float[Array, "b t d"]:
    """Returns the rows of a table [v d], in its type; those of a quantised one in float32.

    XLA on CPU gathers bfloat16 in float32, and moves the conversion of the whole table out of the
    decoding loop, where it lives as a second copy. Behind the barrier the table depends on the ids:
    only the rows are converted.
    """
    table, ids = jax.lax.optimization_barrier((table, ids))
    return quantized_rows(table, ids) if isinstance(table, QuantizedKernel) else table[ids]


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
        operands = inputs, scale, jnp.float32(self.epsilon)
        if scale.dtype not in _NORM_SCALES or not kernels.is_available():
            return _rms_norm(*operands)
        result = jax.ShapeDtypeStruct(inputs.shape, jnp.float32)
        return kernels.call("rms_norm", _rms_norm, result, *operands)


def _rms_norm(
    inputs: Float32[Array, "b t d"], scale: Float[Array, "d"], epsilon: Float32[Array, ""]
) -> Float32[Array, "b t d"]:
    """Normalises by XLA, which adds up many rows in another order than few."""
    mean_square = jnp.mean(jnp.square(inputs), axis=-1, keepdims=True)
    return inputs * jax.lax.rsqrt(mean_square + epsilon) * scale.astype(jnp.float32)


def swiglu(gate_up: Float32[Array, "b t 2 f"]) -> Float32[Array, "b t f"]:
    """Returns silu(gate) * up (arXiv 2002.05202)."""
    if not kernels.is_available():
        return _swiglu(gate_up)
    b, t, _, f = gate_up.shape
    return kernels.call("swiglu", _swiglu, jax.ShapeDtypeStruct((b, t, f), jnp.float32), gate_up)


def _swiglu(gate_up: Float32[Array, "b t 2 f"]) -> Float32[Array, "b t f"]:
    """Computes it by XLA."""
    return jax.nn.silu(gate_up[:, :, 0]) * gate_up[:, :, 1]


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
        gate_up = kernel_param(self, "gate_up", (2, cfg.hidden_dim, cfg.embed_dim))
        gate_up = linear(inputs, gate_up)
        if cfg.mlp_bias:
            gate_up += self.param("gate_up_bias", nn.initializers.zeros, (2, cfg.hidden_dim))
        outputs = linear(
            swiglu(gate_up), kernel_param(self, "down", (cfg.embed_dim, cfg.hidden_dim))
        )
        if cfg.mlp_bias:
            outputs += self.param("down_bias", nn.initializers.zeros, (cfg.embed_dim,))
        return outputs

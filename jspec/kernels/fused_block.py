"""A decoder block of few tokens from eight kernels."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from jspec.kernels.gpu import (
    ACTIVATIONS,
    DECODED,
    TILE,
    attend_block,
    few_rows_product,
    normed_rows,
)
from jspec.kernels.norm import rms_norm
from jspec.kernels.packed import PackedKernel
from jspec.kernels.packed_formats import FORMATS
from jspec.kernels.product import Kernel
from jspec.kernels.quantized import QuantizedKernel

_MOST_TOKENS = 16  # of a row
MOST_ROWS = 64  # products of more are XLA's: they are bound by arithmetic
_HEAD_SIZES = range(32, 257, 2)  # half of the smallest is a tile


def run_block(
    config: Any,
    block_offset: int,
    params: Any,
    x: Float32[Array, "b t d"],
    rope: tuple[Float32[Array, "b t half"], Float32[Array, "b t half"]],
    visible: Bool[Array, "b t s"],
    cache: Any,
    inputs: Float32[Array, "b t i"] | None = None,
) -> tuple[Float32[Array, "b t d"], Any]:
    """Returns what the model's `Block` returns, for what `takes_block` takes.

    `config`, `params` and `cache` are a decoder's, its layer's and one of a layer. The cache's
    memory is taken over. Attention reads `inputs` as they are, or else `x` after its norm.
    """
    b, t, _ = x.shape
    k, g, h = config.num_kv_heads, config.num_groups, config.head_dim
    attention, mlp, epsilon = params["attention"], params["mlp"], config.norm_epsilon

    def norm(name: str) -> dict[str, Any]:
        if config.norms == "post":
            return {}
        return {"norm": params[name]["scale"], "epsilon": epsilon}

    def add(rows: Array, inputs: Array, kernel: Any, bias: Array | None, name: str) -> Array:
        """Adds half of a block to the residual stream."""
        scale = config.residual_scale
        if config.norms == "pre":
            return multiply(inputs, kernel, bias=bias, residual=rows, scale=scale)
        # A norm of the outputs needs all of them, which no program has: it is XLA's.
        outputs = multiply(inputs, kernel, bias=bias)[None]
        return rows + scale * rms_norm(outputs, params[name]["scale"], jnp.float32(epsilon))[0]

    rows = x.reshape(b * t, -1)
    bias = attention.get("qkv_bias")
    if inputs is None:
        qkv = multiply(rows, attention["qkv"], bias=bias, **norm("attention_norm"))
    else:
        qkv = multiply(inputs.reshape(b * t, -1), attention["qkv"], bias=bias)
    norms = None
    if config.qk_norm is not None:
        norms = attention["query_norm"]["scale"], attention["key_norm"]["scale"]
    scale = h**-0.5 if config.attention_scale is None else config.attention_scale
    mixed, keys, values = attend_block(
        qkv.reshape(b, t, k, g + 2, h), rope, cache.length + block_offset, visible,
        cache.keys[0], cache.values[0],
        norms=norms, epsilon=epsilon, scale=scale, cap=config.attention_softcap,
    )  # fmt: skip
    mixed = mixed.reshape(b * t, -1)
    rows = add(rows, mixed, attention["out"], attention.get("out_bias"), "attention_post_norm")
    gated = multiply(
        rows, mlp["gate_up"], bias=mlp.get("gate_up_bias"), activation=config.activation,
        dtype=keys.dtype, **norm("mlp_norm"),
    )  # fmt: skip
    rows = add(rows, gated, mlp["down"], mlp.get("down_bias"), "mlp_post_norm")
    return rows.reshape(x.shape), cache.replace(keys=(keys,), values=(values,))


def takes_block(config: Any, params: Any, x: Float32[Array, "b t d"], cache: Any) -> bool:
    """Returns whether `run_block` computes a layer: few tokens, kernels and caches that it knows.

    Layers of experts, norms of all heads together, float32, joined kernels and pages are XLA's.
    """
    attention, mlp = params["attention"], params["mlp"]
    if hasattr(cache, "table"):
        return False
    if config.qk_norm not in (None, "head") or config.activation not in ACTIVATIONS:
        return False
    if x.shape[1] > _MOST_TOKENS or math.prod(x.shape[:2]) > MOST_ROWS or "down" not in mlp:
        return False
    sizes = {"qkv": attention["qkv"].shape[-1], "out": config.num_heads * config.head_dim}
    sizes |= {"gate_up": config.embed_dim, "down": config.hidden_dim}
    has_kernels = all(takes_kernel((attention | mlp)[name], size) for name, size in sizes.items())
    has_heads = config.head_dim in _HEAD_SIZES and cache.keys[0].dtype == jnp.bfloat16
    return has_kernels and has_heads


def takes_kernel(kernel: Kernel, num_inputs: int) -> bool:
    """Returns whether a kernel is bfloat16, integers or packed, and its sizes whole tiles."""
    is_known = isinstance(kernel, (jax.Array, QuantizedKernel))
    if isinstance(kernel, PackedKernel):
        is_known = kernel.kind in DECODED
    # Twice a tile of outputs, for gates.
    size = math.prod(kernel.shape)
    has_tiles = num_inputs % TILE == 0 and size % (2 * TILE * num_inputs) == 0
    return is_known and kernel.dtype == jnp.bfloat16 and has_tiles


def multiply(
    rows: Float[Array, "r i"],
    kernel: Kernel,
    *,
    norm: Float[Array, "i"] | None = None,
    epsilon: float = 0.0,
    **options: Any,
) -> Float[Array, "r o"]:
    """Multiplies rows, or their RMSNorm, by a kernel that `takes_kernel` takes.

    See `few_rows_product`.
    """
    if norm is not None:
        takes_bytes = isinstance(kernel, PackedKernel) and kernel.takes_bytes
        dtype = jnp.float32 if takes_bytes else jnp.bfloat16  # not rounded twice
        rows = normed_rows(rows, norm, epsilon=epsilon, dtype=dtype)
    if isinstance(kernel, PackedKernel):
        packed = kernel.kind, FORMATS[kernel.kind]
        form = {"packed": packed, "takes_bytes": kernel.takes_bytes}
        return few_rows_product(rows, kernel.strips, **form, **options)
    if isinstance(kernel, QuantizedKernel):
        integers = {"units": kernel.scales, "multipliers": kernel.multipliers}
        return few_rows_product(rows, kernel.values, **integers, **options)
    return few_rows_product(rows, kernel.reshape(-1, rows.shape[1]), **options)  # type: ignore[union-attr]

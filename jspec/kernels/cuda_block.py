"""A decoder block of few tokens on a GPU, by kernels in CUDA C++: candidates beside XLA's block.

    candidate     products   attention   calls of a layer
    attention     XLA's      CUDA C++    XLA's, and one
    cuda          CUDA C++   CUDA C++    five: four products, attention
    layer         CUDA C++   CUDA C++    one, of six kernels
    layer-pdl     CUDA C++   CUDA C++    the same; each kernel starts before the last one has ended

All write the block's keys and values into the cache themselves, and read pages through their
table. A token's result does not depend on the tokens beside it, nor on how many there are. Which
candidate computes a model is decided by a trial; see `contest`. A packed product outside of blocks
has a candidate, too: `multiply` alone.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32

from jspec.kernels import library
from jspec.kernels.contest import Candidate
from jspec.kernels.layer import geglu, rms_norm, swiglu
from jspec.kernels.packed import FORMATS, STRIP, JoinedKernel, PackedKernel
from jspec.kernels.product import Kernel, product
from jspec.kernels.quantized import GROUP, QuantizedKernel

Rope = tuple[Float32[Array, "b t half"], Float32[Array, "b t half"]]

_MOST_TOKENS = 16  # of a row
_HEAD_SIZES = range(32, 257, 32)
_TILE = 64  # slots; they and the next three are those of cuda/attention.cu
_SLOTS_A_STRIP = 16  # that follow each other in a page
_MOST_SPLITS = 32
_BLOCKS = 256  # twice the multiprocessors of the largest GPUs
_GATES = {"silu": swiglu, "gelu_tanh": geglu}
_KERNELS = "qkv", "out", "gate_up", "down"
MOST_ROWS = 64  # every 16 read all weights; products of more are bound by arithmetic
# The numbers are those of `Activation` and `Storage` in cuda/product.cuh.
ACTIVATIONS = {None: 0, "silu": 1, "gelu_tanh": 2}
_BFLOAT16, _INT8, _INT4 = 0, 1, 2
PACKED = {"q4_0": 3, "q5_0": 4, "q8_0": 5, "q4_k": 6, "q5_k": 7, "q6_k": 8}


def takes_kernel(kernel: Kernel, num_inputs: int) -> bool:
    """Returns whether `multiply` takes a kernel: of a bfloat16 model, a known format, whole tiles.

    It then has a multiple of 32 outputs, two tiles, so that it can be gates and what they multiply.
    """
    if isinstance(kernel, PackedKernel):
        inputs = FORMATS[kernel.kind].inputs if kernel.kind in PACKED else 0
    elif isinstance(kernel, QuantizedKernel) and kernel.multipliers is not None:
        inputs = 4 * GROUP  # whose multipliers are loaded together
    elif isinstance(kernel, QuantizedKernel) or hasattr(kernel, "ndim"):
        inputs = GROUP
    else:
        inputs = 0
    if not inputs or kernel.dtype != jnp.bfloat16 or num_inputs % inputs:
        return False
    return math.prod(kernel.shape) % (2 * STRIP * num_inputs) == 0


class Fused(NamedTuple):
    """What is computed with a product: residual + scale · act(norm(rows) · kernelᵀ + bias).

    Attributes:
      norm: the scales [i] of an RMSNorm (arXiv 1910.07467) of the rows, which is summed in float32.
      epsilon: of the norm.
      bias: of the outputs.
      activation: of the gate; then the first half of the outputs are gates and the second what they
        multiply, and the result has half as many.
      residual: what the result is added to.
      scale: of the result, before the residual is added.
      dtype: of the result, float32 or bfloat16.
    """

    norm: Float[Array, "i"] | None = None
    epsilon: float = 0.0
    bias: Float[Array, "..."] | None = None
    activation: str | None = None
    residual: Float32[Array, "r p"] | None = None
    scale: float = 1.0
    dtype: Any = jnp.float32


NOTHING_FUSED = Fused()


def multiply(
    rows: Float[Array, "r i"],
    kernel: Kernel,
    fused: Fused = NOTHING_FUSED,
    *,
    overlaps: bool = False,
) -> Float[Array, "r p"]:
    """Returns the product of rows, and what is fused with it.

    Rows, float32 or bfloat16, are rounded to bfloat16 for the product, after the norm.

    Args:
      rows: the inputs.
      kernel: that `takes_kernel` takes.
      fused: what is computed with the product.
      overlaps: whether the product may start, and fetch its weights, while the kernel before it on
        the GPU still runs.

    Raises:
      ValueError: the activation is not in `ACTIVATIONS`.
    """
    activation, bias, residual = fused.activation, fused.bias, fused.residual
    if activation not in ACTIVATIONS:
        raise ValueError(f"expected an activation among {[*ACTIVATIONS]}, got {activation!r}")
    num_rows, num_inputs = rows.shape
    num_outputs = math.prod(kernel.shape) // num_inputs // (1 if activation is None else 2)
    storage, weights, units, multipliers = storage_of(kernel, num_inputs)
    optional = units, multipliers, fused.norm, None if bias is None else bias.reshape(-1), residual
    # XLA has no operands that are left out: they are empty.
    empty = np.zeros([0], np.float32)
    operands = [empty if operand is None else operand for operand in optional]
    # The result may take the residual's memory: an element is read by the thread that writes it.
    # XLA copies a residual that is needed later, or is the rows, too.
    is_in_place = residual is not None and jnp.dtype(fused.dtype) == residual.dtype
    call = jax.ffi.ffi_call(
        "jspec_cuda_product",
        jax.ShapeDtypeStruct((num_rows, num_outputs), fused.dtype),
        input_output_aliases={1 + len(operands): 0} if is_in_place else None,
    )
    return call(
        rows,
        weights,
        *operands,
        storage=np.int32(storage),
        activation=np.int32(ACTIVATIONS[activation]),
        epsilon=np.float32(fused.epsilon),
        scale=np.float32(fused.scale),
        takes_bytes=isinstance(kernel, PackedKernel) and kernel.takes_bytes,
        overlaps=overlaps,
    )


def storage_of(
    kernel: Kernel, num_inputs: int
) -> tuple[int, jax.Array, jax.Array | None, jax.Array | None]:
    """Returns the number of its format, the weights, and the units and multipliers of integers."""
    if isinstance(kernel, PackedKernel):
        return PACKED[kernel.kind], kernel.strips, None, None
    if isinstance(kernel, QuantizedKernel):
        storage = _INT8 if kernel.multipliers is None else _INT4
        return storage, kernel.values, kernel.scales, kernel.multipliers
    return _BFLOAT16, kernel.reshape(-1, num_inputs), None, None  # type: ignore[union-attr]


def attend(
    config: Any,
    qkv: Float32[Array, "b t k p h"],
    rope: Rope,
    visible: Bool[Array, "b t s"],
    cache: Any,
    block_offset: int = 0,
    norms: tuple[Float[Array, "h"], Float[Array, "h"]] | None = None,
) -> tuple[Float[Array, "b t n h"], Any]:
    """Writes a block's keys and values and attends to what is visible, in bfloat16.

    Args:
      config: a decoder's.
      qkv: the products; p heads for each key/value head, as in `kernels.rotate_heads`.
      rope: cosines and sines of every token's angles.
      visible: which slots a query sees; none after the block's, whatever it says.
      cache: of one layer, contiguous or in pages. Its memory is taken over.
      block_offset: slots of the block that earlier calls have written.
      norms: scales of RMSNorms of each query head and of each key head, before the rotation.
    """
    b, t, k, p, h = qkv.shape
    (keys,), (values,) = cache.keys, cache.values
    operands = _attention_operands(rope, visible, cache, block_offset, norms)
    mixed = jax.ShapeDtypeStruct((b, t, k * (p - 2), h), keys.dtype)
    results = (*_shapes_of(keys, values), mixed, *_split_shapes(config, visible))
    call = jax.ffi.ffi_call("jspec_cuda_attention", results, input_output_aliases={0: 0, 1: 1})
    keys, values, mixed, *_ = call(keys, values, qkv, *operands, **_attention_attributes(config))
    return mixed, cache.replace(keys=(keys,), values=(values,))


def run_block(
    multiply: Callable[..., Array], config: Any, block_offset: int, *operands: Any
) -> tuple[Float32[Array, "b t d"], Any]:
    """Returns what the model's `Block` returns, with one call for each operation.

    Args:
      multiply: computes products; see `multiply`.
      config: a decoder's.
      block_offset: slots of the block that earlier calls have written.
      operands: those of `kernels.compute_block`.
    """
    params, x, rope, visible, cache, *inputs = operands
    b, t, _ = x.shape
    k, g, h = config.num_kv_heads, config.num_groups, config.head_dim
    attention, mlp, epsilon = params["attention"], params["mlp"], config.norm_epsilon

    def normed(name: str, **others: Any) -> Fused:
        if config.norms == "post":
            return Fused(**others)
        return Fused(params[name]["scale"], epsilon, **others)

    def add(rows: Array, inputs: Array, half: Any, kernel: str, post_norm: str) -> Array:
        """Adds half of a block to the residual stream."""
        bias, scale = half.get(f"{kernel}_bias"), config.residual_scale
        if config.norms == "pre":
            return multiply(inputs, half[kernel], Fused(bias=bias, residual=rows, scale=scale))
        # A norm of the outputs needs all of them, which no block of threads has: it is XLA's.
        outputs = multiply(inputs, half[kernel], Fused(bias=bias))[None]
        return rows + scale * rms_norm(outputs, params[post_norm]["scale"], jnp.float32(epsilon))[0]

    rows = x.reshape(b * t, -1)
    bias = attention.get("qkv_bias")
    if inputs:  # what attention reads as it is, instead of x after its norm
        qkv = multiply(inputs[0].reshape(b * t, -1), attention["qkv"], Fused(bias=bias))
    else:
        qkv = multiply(rows, attention["qkv"], normed("attention_norm", bias=bias))
    qkv = qkv.reshape(b, t, k, g + 2, h)
    mixed, cache = attend(
        config, qkv, rope, visible, cache, block_offset, _head_norms(config, attention)
    )
    rows = add(rows, mixed.reshape(b * t, -1), attention, "out", "attention_post_norm")
    options = {"activation": config.activation, "dtype": jnp.bfloat16}
    fused = normed("mlp_norm", bias=mlp.get("gate_up_bias"), **options)
    gated = multiply(rows, mlp["gate_up"], fused)
    rows = add(rows, gated, mlp, "down", "mlp_post_norm")
    return rows.reshape(x.shape), cache


def multiply_by_xla(
    rows: Float[Array, "r i"], kernel: Any, fused: Fused = NOTHING_FUSED
) -> Float32[Array, "r p"]:
    """Returns what `multiply` returns, by XLA, and in float32.

    The next product rounds its rows itself.
    """
    if fused.norm is not None:
        rows = rms_norm(rows[None], fused.norm, jnp.float32(fused.epsilon))[0]
    if not isinstance(kernel, (QuantizedKernel, PackedKernel, JoinedKernel)):
        kernel = kernel.reshape(-1, rows.shape[1])  # the others are matrices already
    outputs = product(rows, kernel)
    if fused.bias is not None:
        outputs += fused.bias.reshape(-1).astype(jnp.float32)
    if fused.activation is not None:
        outputs = _GATES[fused.activation](outputs.reshape(1, len(rows), 2, -1))[0]
    if fused.scale != 1.0:
        outputs *= fused.scale
    return outputs if fused.residual is None else fused.residual + outputs


def run_layer(
    overlaps: bool, config: Any, block_offset: int, *operands: Any
) -> tuple[Float32[Array, "b t d"], Any]:
    """Returns the same by one call; see `cuda/layer.cu`.

    `overlaps` lets each of its kernels start while the one before it still runs.
    """
    params, x, rope, visible, cache = operands
    b, t, d = x.shape
    attention, mlp = params["attention"], params["mlp"]
    (keys,), (values,) = cache.keys, cache.values
    norms = _head_norms(config, attention)
    empty = np.zeros([0], np.float32)
    products, storages, takes_bytes = [], [], []
    for half, name in zip((attention, attention, mlp, mlp), _KERNELS, strict=True):
        kernel, bias = half[name], half.get(f"{name}_bias")
        storage, *weights = storage_of(kernel, _num_inputs(config)[name])
        storages.append(storage)
        takes_bytes.append(isinstance(kernel, PackedKernel) and kernel.takes_bytes)
        products += [empty if operand is None else operand for operand in (*weights, bias)]
    heads = config.num_heads * config.head_dim
    qkv = heads + 2 * config.num_kv_heads * config.head_dim
    rows = x.reshape(b * t, d)
    results = (
        *_shapes_of(keys, values),
        jax.ShapeDtypeStruct((b * t, heads), jnp.bfloat16),
        *_split_shapes(config, visible),
        jax.ShapeDtypeStruct((b * t, qkv), jnp.float32),
        jax.ShapeDtypeStruct((b * t, d), jnp.float32),
        jax.ShapeDtypeStruct((b * t, config.hidden_dim), jnp.bfloat16),
        *_shapes_of(rows),
    )
    call = jax.ffi.ffi_call("jspec_cuda_layer", results, input_output_aliases={0: 0, 1: 1})
    keys, values, *_, rows = call(
        keys,
        values,
        rows,
        *_attention_operands(rope, visible, cache, block_offset, norms),
        params["attention_norm"]["scale"],
        params["mlp_norm"]["scale"],
        *products,
        storages=np.array(storages, np.int64),
        takes_bytes=np.array(takes_bytes, np.int64),
        activation=np.int32(ACTIVATIONS[config.activation]),
        residual_scale=np.float32(config.residual_scale),
        overlaps=overlaps,
        **_attention_attributes(config),
    )
    return rows.reshape(x.shape), cache.replace(keys=(keys,), values=(values,))


def takes_attention(config: Any, params: Any, x: Float32[Array, "b t d"], cache: Any) -> bool:
    """Returns whether `attend` computes a layer's attention: few tokens, a bfloat16 cache.

    Layers of experts, norms of all heads together and what is split over devices are XLA's.
    """
    keys = cache.keys[0]
    is_known = config.qk_norm in (None, "head") and config.activation in _GATES
    if not is_known or "down" not in params["mlp"] or cache.is_split:
        return False
    if x.shape[1] > _MOST_TOKENS or math.prod(x.shape[:2]) > MOST_ROWS:
        return False
    has_pages = not hasattr(cache, "table") or keys.shape[2] % _SLOTS_A_STRIP == 0
    has_heads = config.head_dim in _HEAD_SIZES and keys.dtype == jnp.bfloat16
    return has_heads and has_pages and library.is_cuda_available()


def takes_block(config: Any, params: Any, x: Float32[Array, "b t d"], cache: Any) -> bool:
    """Returns whether the products are CUDA C++, too: kernels of known formats, whole tiles."""
    kernels = params["attention"] | params["mlp"]
    if "down" not in kernels:
        return False
    # Attention may read more than the stream, and says how much.
    sizes = _num_inputs(config) | {"qkv": kernels["qkv"].shape[-1]}
    has_kernels = all(takes_kernel(kernels[name], sizes[name]) for name in _KERNELS)
    return has_kernels and takes_attention(config, params, x, cache)


def takes_layer(config: Any, params: Any, x: Float32[Array, "b t d"], cache: Any) -> bool:
    """Returns whether one call computes it all: norms before, and of the stream itself."""
    reads_stream = params["attention"]["qkv"].shape[-1] == x.shape[-1]
    is_plain = config.norms == "pre" and "attention_norm" in params and reads_stream
    return is_plain and takes_block(config, params, x, cache)


def num_splits(num_heads: int, num_slots: int) -> int:
    """Returns the splits of each row's key heads, a power of two.

    Each split writes a partial result that is read again, so there are only as many as keep a
    device busy. They depend on the batch, not on the block.
    """
    wanted = _power_of_two(-(-_BLOCKS // num_heads))
    tiles = -(-num_slots // _TILE)
    return min(_MOST_SPLITS, wanted, _power_of_two(tiles + 1) // 2)


def _power_of_two(size: int) -> int:
    """Returns the smallest power of two that is not below."""
    return 1 << (size - 1).bit_length()


def _shapes_of(*arrays: Array) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays)


def _split_shapes(config: Any, visible: Array) -> tuple[jax.ShapeDtypeStruct, ...]:
    b, t, s = visible.shape
    k = config.num_kv_heads
    parts = b, k, t * config.num_groups, num_splits(b * k, s)
    return tuple(jax.ShapeDtypeStruct((*parts, size), jnp.float32) for size in (config.head_dim, 2))


def _attention_operands(
    rope: Rope, visible: Array, cache: Any, block_offset: int, norms: tuple[Array, Array] | None
) -> tuple[Any, ...]:
    """Returns the operands of attention but for the cache and the products."""
    nothing = np.zeros([0], np.int32), np.zeros([0], np.float32)
    table = getattr(cache, "table", nothing[0])
    scales = (nothing[1], nothing[1]) if norms is None else norms
    return *rope, cache.length + block_offset, visible, table, *scales


def _attention_attributes(config: Any) -> dict[str, np.float32]:
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    cap = config.attention_softcap or 0.0
    attributes = {"epsilon": config.norm_epsilon, "scale": scale, "cap": cap}
    return {name: np.float32(number) for name, number in attributes.items()}


def _head_norms(config: Any, attention: Any) -> tuple[Array, Array] | None:
    if config.qk_norm is None:
        return None
    return attention["query_norm"]["scale"], attention["key_norm"]["scale"]


def _num_inputs(config: Any) -> dict[str, int]:
    heads = config.num_heads * config.head_dim
    stream, hidden = config.embed_dim, config.hidden_dim
    return {"qkv": stream, "out": heads, "gate_up": stream, "down": hidden}


# Of the first one XLA multiplies, which promises nothing for other widths.
CANDIDATES = (
    Candidate("attention", takes_attention, functools.partial(run_block, multiply_by_xla)),
    Candidate("cuda", takes_block, functools.partial(run_block, multiply), has_equal_widths=True),
    Candidate("layer", takes_layer, functools.partial(run_layer, False), has_equal_widths=True),
    Candidate("layer-pdl", takes_layer, functools.partial(run_layer, True), has_equal_widths=True),
)

"""Attending to the slots of a cache, on a GPU by cuDNN too, and writing a block there."""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jspec.common.errors import say
from jspec.common.typing import RowCounts
from jspec.kernels import library
from jspec.kernels.backend import backend, exact_float32, has_bfloat16, is_foreign, pinned
from jspec.kernels.library import in_cpp, with_derivatives_of

_NATIVE_DIMS = (32, 64, 128, 256)  # widths of a head that the C++ computes
_MASKED = -1e30  # finite, so that a query that may see nothing gives no NaN
_MANY_QUERIES = 64  # a whole chunk of a prompt
_TOLERANCE = 0.03  # of the largest result: bfloat16 rounds to 0.004, several times


def takes_queries(queries: Array, keys: Array, *others: Array) -> bool:
    """Returns whether the C++ attends, from the shapes and types of queries and keys.

    XLA computes all slots of the cache, whatever the length of the text. With 64 queries it takes
    up to 25 times as long as the C++; only where the cache is full it may be a fifth faster.
    """
    del others
    has_types = queries.dtype == jnp.float32 and keys.dtype in (jnp.bfloat16, jnp.float32)
    return queries.shape[3] in _NATIVE_DIMS and has_types


def reads_rows_in_place(head_dim: int) -> bool:
    """Returns whether queries of any rows, side by side, read these rows' slots without a copy."""
    return backend() == "cpu" and head_dim in _NATIVE_DIMS and library.is_available()


def in_cudnn(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Lets cuDNN compute an attention that is written in JAX, for many queries in bfloat16.

    It never writes the scores [t n s] to memory, which XLA writes in float32 and reads several
    times: for 256 queries of Llama-3.2-3B about nine times the bytes of a layer's keys and values.
    Each shape is tried once on random numbers; where cuDNN fails or says something else than XLA,
    XLA computes with a warning, as it does with `JSPEC_CUDNN=0` in the environment. The derivatives
    stay those of the JAX.
    """
    reference = inspect.unwrap(attend)

    @functools.wraps(attend)
    def operation(*operands: Array) -> Array:
        queries, keys, *_ = operands
        is_wanted = queries.shape[1] >= _MANY_QUERIES and keys.dtype == jnp.bfloat16
        shapes = ((leaf.shape, leaf.dtype) for leaf in operands)
        # For a device that is not here cuDNN cannot be tried: it is taken to work.
        if is_wanted and _is_on() and (is_foreign() or _works(reference, *shapes)):
            return with_derivatives_of(reference, attend_fused, *operands)
        return attend(*operands)

    return operation


@in_cudnn
@library.in_cpp("attention", lambda queries, *_: library.floats(*queries.shape), takes_queries)
def attend(
    queries: Float[Array, "b t n h"],
    keys: Float[Array, "b k s h"],
    values: Float[Array, "b k s h"],
    visible: Bool[Array, "b t s"],
) -> Float[Array, "b t n h"]:
    """Returns softmax(queries · keysᵀ) · values over the visible slots, heads in groups of n / k.

    Queries are already scaled. Scores and softmax are float32. For a query that sees nothing the
    result is finite and means nothing.
    """
    return attend_capped(queries, keys, values, visible, None)


def attend_capped(
    queries: Float[Array, "b t n h"],
    keys: Float[Array, "b k s h"],
    values: Float[Array, "b k s h"],
    visible: Bool[Array, "b t s"],
    cap: float | None,
    bias: Float[Array, "#b n t s"] | None = None,
) -> Float[Array, "b t n h"]:
    """Returns the same with scores of cap · tanh(scores / cap), unless cap is None; in JAX.

    A bias is added to the scores.
    """
    b, t, n, h = queries.shape
    k = keys.shape[1]
    # The n / k query heads that share a key head become more queries of that head: one product.
    grouped = queries.reshape(b, t, k, n // k, h).transpose(0, 2, 1, 3, 4)
    grouped = grouped.reshape(b, k, t * (n // k), h).astype(keys.dtype)
    multiply = functools.partial(
        jnp.einsum, precision=exact_float32(keys.dtype), preferred_element_type=jnp.float32
    )
    scores = multiply("bkqh,bksh->bkqs", grouped, keys)
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    if bias is not None:
        by_group = bias.reshape(bias.shape[0], k, n // k, t, -1).transpose(0, 1, 3, 2, 4)
        scores += by_group.reshape(bias.shape[0], k, t * (n // k), -1)
    mask = jnp.repeat(visible, n // k, axis=1)[:, None]
    probs = jax.nn.softmax(jnp.where(mask, scores, _MASKED), axis=-1)
    mixed = multiply("bkqs,bksh->bkqh", probs.astype(values.dtype), values)
    mixed = mixed.reshape(b, k, t, n // k, h).transpose(0, 2, 1, 3, 4)
    return mixed.reshape(b, t, n, h).astype(queries.dtype)


def attend_fused(
    queries: Float[Array, "b t n h"],
    keys: Float[Array, "b k s h"],
    values: Float[Array, "b k s h"],
    visible: Bool[Array, "b t s"],
) -> Float[Array, "b t n h"]:
    """Attends by JAX's fused attention; see `kernels.attend`.

    Queries are rounded to the type of the keys.
    """
    by_head = queries.astype(keys.dtype).transpose(0, 2, 1, 3)
    with jax.numpy_dtype_promotion("standard"):  # JAX's function mixes types itself
        mixed = _cudnn(by_head, keys, values, visible[:, None])
    return mixed.transpose(0, 2, 1, 3).astype(queries.dtype)


def _cudnn(
    queries: Float[Array, "b n t h"],
    keys: Float[Array, "b k s h"],
    values: Float[Array, "b k s h"],
    mask: Bool[Array, "b 1 t s"],
) -> Float[Array, "b n t h"]:
    # JAX's public function knows [b s k h] only, for which every layer's cache would be transposed.
    from jax._src.cudnn.fused_attention_stablehlo import dot_product_attention

    mixed: Any = dot_product_attention(
        queries, keys, values, mask=mask, scale=1.0, qkv_layout="BNTH"
    )
    return mixed


def _is_on() -> bool:
    return backend() == "gpu" and os.environ.get("JSPEC_CUDNN") != "0" and has_bfloat16()


@functools.cache
def _works(reference: Callable[..., Any], *operands: tuple[tuple[int, ...], jnp.dtype]) -> bool:
    """Tries a shape: there may be no cuDNN, no kernel of it for the shape, or a wrong result."""
    try:
        # The caller is being traced; the trial must be computed at once, and not become part of it.
        with jax.ensure_compile_time_eval():
            worst = float(jax.jit(functools.partial(_try, reference, operands))())
        reason = f"on random numbers its results differ from XLA's by {worst:.1%}"
    except Exception as failure:
        first, worst = (str(failure).strip().splitlines() or [""])[0], jnp.nan
        reason = f"{type(failure).__name__}: {first[:100]}"
    if not worst <= _TOLERANCE:  # nor is it NaN
        message = f"jspec: cuDNN's attention is not used ({reason}); reading prompts takes longer"
        say(message)
    return worst <= _TOLERANCE


def _try(reference: Callable[..., Any], operands: Any) -> Array:
    """Returns the largest distance from the reference, as a share of its largest result."""
    *floats, (shape, _) = operands
    _, t, s = shape
    queries, keys, values = (
        jax.random.normal(jax.random.key(seed), *operand) for seed, operand in enumerate(floats)
    )
    # A chain in the middle of the slots.
    visible = jnp.broadcast_to(jnp.arange(s) <= (s - t) // 2 + jnp.arange(t)[:, None], shape)
    fused = attend_fused(queries, keys, values, visible)
    # Of the first key head alone: XLA's scores of all heads might not fit the memory.
    num_queries = queries.shape[2] // keys.shape[1]
    expected = reference(queries[:, :, :num_queries], keys[:, :1], values[:, :1], visible)
    return jnp.max(jnp.abs(fused[:, :, :num_queries] - expected)) / jnp.max(jnp.abs(expected))


TAIL = 16  # slots after the capacity, so that a small block written at its end stays inside


def takes_block(layer: Array, new: Array, *_: Array) -> bool:
    """Returns whether the C++ writes, from the types of layer and block."""
    return layer.dtype in (jnp.bfloat16, jnp.float32) and new.dtype == jnp.float32


@in_cpp("write_rows", lambda layer, *_: jax.ShapeDtypeStruct(layer.shape, layer.dtype), takes_block)
def write_rows(
    layer: Float[Array, "b k s h"], new: Float[Array, "b t k h"], start: RowCounts
) -> Float[Array, "b k s h"]:
    """Returns the layer with `new` written from each row's own slot on, in place where possible.

    What falls past the last slot is lost. It is never shifted onto a good slot. A layer has `TAIL`
    slots more than its capacity, whose contents mean nothing.
    """
    new = new.astype(layer.dtype)
    b, t = new.shape[:2]
    is_wide, is_tpu = t > TAIL, backend() == "tpu"
    # One row's block is written in place everywhere. Those of several rows take a loop, which is
    # slow on a GPU; a scatter is slow on a TPU, which copies the layer for it.
    if (is_wide and not (is_tpu and t <= layer.shape[2])) or (b > 1 and backend() == "gpu"):
        rows, slots = jnp.arange(b)[:, None], start[:, None] + jnp.arange(t)
        return layer.at[rows, :, slots].set(new, mode="drop")  # drops what falls outside
    # For a scatter XLA on CPU converts a whole bfloat16 layer to float32; a dynamic_update_slice is
    # done in place. But it shifts a write that would pass the end back onto good slots. So the
    # write begins at the capacity at the latest, and the tail has space for the block.
    new, begin = new.transpose(0, 2, 1, 3), jnp.minimum(start, layer.shape[2] - max(t, TAIL))

    def write(turn: Array | int, layer: Array) -> Array:
        row = b - 1 - turn  # from the last: from the first, libtpu fails to simplify the loop
        block, place = jax.lax.dynamic_slice_in_dim(new, row, 1), (row, 0, begin[row], 0)
        if is_wide:  # the tail has no space: before a block that was moved stands what stood there
            moved, old = start[row] - begin[row], jax.lax.dynamic_slice(layer, place, block.shape)
            is_own = jnp.arange(t)[:, None] >= moved
            block = jnp.where(is_own, jnp.roll(block, moved, axis=2), old)
        return pinned(jax.lax.dynamic_update_slice(layer, block, place))

    # A loop, because XLA fuses a chain of updates into one that passes over the whole layer for
    # every row.
    return write(0, layer) if b == 1 else jax.lax.fori_loop(0, b, write, layer)

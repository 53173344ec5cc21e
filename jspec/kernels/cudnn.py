"""Attention of many queries on a GPU by cuDNN, which never writes the scores to memory.

XLA's attention writes scores [t n s] in float32 and reads them several times. For 256 queries of
Llama-3.2-3B that is about nine times the bytes of one layer's keys and values.

Each shape is tried once on random numbers; where cuDNN fails or says something else than XLA, XLA
computes with a warning. `JSPEC_CUDNN=0` in the environment leaves everything to XLA.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jspec.kernels.backend import backend, has_bfloat16, is_foreign
from jspec.kernels.library import with_derivatives_of

_MANY_QUERIES = 64
_TOLERANCE = 0.03  # of the largest result: bfloat16 rounds to 0.004, several times


def in_cudnn(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Lets cuDNN compute an attention that is written in JAX, for many queries in bfloat16.

    The derivatives stay those of the JAX.
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
        print(message, file=sys.stderr, flush=True)
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

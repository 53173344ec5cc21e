"""Attention of many queries on a GPU by cuDNN, which never writes the scores to memory.

XLA's attention writes scores [t n s] in float32 and reads them several times. For 256 queries of
Llama-3.2-3B that is about nine times the bytes of one layer's keys and values. cuDNN costs one copy
of those instead, since JAX hands it [b s k h] and the cache is [b k s h]. From 128 queries on the
copy should pay (counted, not measured); in the narrower chunks, of 64 tokens, in which draft models
catch up as well, it would be carried around the loop.

Each shape is tried once, and where cuDNN fails XLA computes with a warning. `JSPEC_CUDNN=0` in the
environment leaves everything to XLA.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jspec.kernels.backend import backend, has_bfloat16, is_foreign
from jspec.kernels.library import with_derivatives_of

_IMPLEMENTATION: Literal["cudnn", "xla"] = "cudnn"
_MANY_QUERIES = 128


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
        if is_wanted and _is_on() and (is_foreign() or _works(*shapes)):
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
    with jax.numpy_dtype_promotion("standard"):  # JAX's function mixes types itself
        mixed = jax.nn.dot_product_attention(
            queries.astype(keys.dtype),
            keys.transpose(0, 2, 1, 3),
            values.transpose(0, 2, 1, 3),
            mask=visible[:, None],
            scale=1.0,
            implementation=_IMPLEMENTATION,
        )
    return mixed.astype(queries.dtype)


def _is_on() -> bool:
    return backend() == "gpu" and os.environ.get("JSPEC_CUDNN") != "0" and has_bfloat16()


@functools.cache
def _works(*operands: tuple[tuple[int, ...], jnp.dtype]) -> bool:
    """Tries a shape: there may be no cuDNN, no kernel of it for the shape, or no memory."""
    try:
        # The caller is being traced; the trial must be computed now, and not become part of it.
        with jax.ensure_compile_time_eval():
            jax.jit(attend_fused)(
                *(jnp.zeros(*operand) for operand in operands)
            ).block_until_ready()
    except Exception as failure:
        first = (str(failure).strip().splitlines() or [""])[0]
        reason = f"{type(failure).__name__}: {first[:100]}"
        message = f"jspec: cuDNN's attention is not used ({reason}); reading prompts takes longer"
        print(message, file=sys.stderr, flush=True)
        return False
    return True

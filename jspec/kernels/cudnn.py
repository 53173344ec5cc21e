"""Attention of many queries on a GPU by cuDNN, which never writes the scores to memory.

XLA's attention writes scores [t n s] in float32 and reads them several times. For 256 queries of
Llama-3.2-3B that is about nine times the bytes of one layer's keys and values. cuDNN costs one copy
of those instead, since JAX hands it [b s k h] and the cache is [b k s h]. From 64 queries on, the
narrower of the chunks in which prompts are read, the copy should pay. Below it should not. Both
claims are counted in bytes, not measured.

cuDNN is trusted with a shape only after a trial: one call on random numbers, under a random mask,
must agree with XLA's. Where it fails or disagrees, XLA computes everything, and one warning says
so. Tests on CPU put JAX's own `implementation="xla"` in cuDNN's place; `tests/test_gpu.py` compares
the two on a GPU. `JSPEC_CUDNN=0` in the environment leaves everything to XLA.
"""

import functools
import logging
import os
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Implementation: TypeAlias = Literal["cudnn", "xla"]

_IMPLEMENTATION: Implementation = "cudnn"
_MANY_QUERIES = 64
_NUM_COMPARED = 16  # queries that XLA computes too, when a shape is tried
_TOLERANCE = 0.02  # of a result's norm; bfloat16 rounds to 0.004
_problems: list[str] = []  # of the shapes whose trial failed


class Shape(NamedTuple):
    """The axes that a compiled call depends on; `jspec.common.typing` names them."""

    b: int
    t: int
    n: int
    k: int
    s: int
    h: int


def is_usable(
    reference: Callable[..., Any], queries: Float[Array, "b t n h"], keys: Float[Array, "b k s h"]
) -> bool:
    """Returns whether cuDNN computes a call of this shape correctly; tries it the first time.

    Args:
      reference: the same attention by XLA.
      queries: float32.
      keys: in the cache's type; cuDNN is used for bfloat16 only.
    """
    b, t, n, h = queries.shape
    if t < _MANY_QUERIES or keys.dtype != jnp.bfloat16 or not _is_wanted():
        return False
    shape = Shape(b, t, n, keys.shape[1], keys.shape[2], h)
    return _is_right(reference, _IMPLEMENTATION, shape)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def call(
    reference: Callable[..., Any],
    queries: Float[Array, "b t n h"],
    keys: Float[Array, "b k s h"],
    values: Float[Array, "b k s h"],
    visible: Bool[Array, "b t s"],
) -> Float[Array, "b t n h"]:
    """Returns what the reference returns, up to rounding, and has the reference's derivatives."""
    return attend_fused(_IMPLEMENTATION, queries, keys, values, visible)


@call.defjvp
def _jvp(
    reference: Callable[..., Any], operands: tuple[Array, ...], tangents: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Differentiates the reference; the mask has no derivative."""
    return jax.jvp(reference, operands, tangents)


def attend_fused(
    implementation: Implementation,
    queries: Float[Array, "b t n h"],
    keys: Float[Array, "b k s h"],
    values: Float[Array, "b k s h"],
    visible: Bool[Array, "b t s"],
) -> Float[Array, "b t n h"]:
    """Attends by JAX's fused attention.

    Args:
      implementation: cuDNN's, or XLA's, which runs on every device and takes the same arrays.
      queries: already scaled; rounded to the type of the keys.
      keys: of all slots.
      values: of all slots.
      visible: which slots each query may see; for a query that sees none the result is finite.
    """
    with jax.numpy_dtype_promotion("standard"):  # JAX's function mixes types itself
        mixed = jax.nn.dot_product_attention(
            queries.astype(keys.dtype),
            keys.transpose(0, 2, 1, 3),
            values.transpose(0, 2, 1, 3),
            mask=visible[:, None],
            scale=1.0,
            implementation=implementation,
        )
    return mixed.astype(queries.dtype)


def _is_wanted() -> bool:
    return jax.default_backend() == "gpu" and os.environ.get("JSPEC_CUDNN") != "0"


@functools.cache
def _is_right(reference: Callable[..., Any], implementation: Implementation, shape: Shape) -> bool:
    """Tries a shape, and warns about the first one that fails."""
    try:
        # The caller is being traced; the trial must be computed now, and not become part of it.
        with jax.ensure_compile_time_eval():
            error = float(_largest_error(reference, implementation, shape, jnp.uint32(0)))
        if error <= _TOLERANCE:
            return True
        problem = f"it differs from XLA's by {error:.3g} of the norm"  # or by NaN
    except Exception as failure:  # no cuDNN, a shape it has no kernel for, no memory, ...
        first = (str(failure).strip().splitlines() or [""])[0]
        problem = f"{type(failure).__name__}: {first[:100]}"
    if not _problems:
        message = "jspec: cuDNN's attention is not used (%s); reading prompts takes longer"
        logging.getLogger("jspec").warning(message, problem)
    _problems.append(problem)
    return False


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _largest_error(
    reference: Callable[..., Any], implementation: Implementation, shape: Shape, seed: Array
) -> Array:
    """Returns the largest distance from the reference's result, relative to its norm.

    Keys, values and the mask are random: the first query sees no slot, the last one nearly all.
    The result is NaN if any number of cuDNN's is not finite.
    """
    b, t, n, k, s, h = shape
    query_key, key_key, value_key, mask_key = jax.random.split(jax.random.key(seed), 4)
    queries = jax.random.normal(query_key, (b, t, n, h), jnp.float32) / jnp.sqrt(jnp.float32(h))
    keys = jax.random.normal(key_key, (b, k, s, h), jnp.bfloat16)
    values = jax.random.normal(value_key, (b, k, s, h), jnp.bfloat16)
    density = jnp.square(jnp.arange(t, dtype=jnp.float32) / t)[None, :, None]
    visible = jax.random.uniform(mask_key, (b, t, s), jnp.float32) < density
    results = attend_fused(implementation, queries, keys, values, visible)
    some = slice(None, None, max(t // _NUM_COMPARED, 1))
    expected = reference(queries[:, some], keys, values, visible[:, some])
    distance = jnp.linalg.norm(results[:, some] - expected, axis=-1)
    errors = distance / jnp.linalg.norm(expected, axis=-1)
    sees = visible[:, some].any(axis=-1, keepdims=True)
    worst = jnp.max(jnp.where(sees, errors, 0.0))
    return jnp.where(jnp.isfinite(results).all(), worst, jnp.nan)

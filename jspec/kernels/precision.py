"""How exactly products are computed."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped


def exact_float32(dtype: DTypeLike) -> jax.lax.Precision | None:
    """Returns the precision of products of that type: float32 means float32, not a GPU's TF32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def dot(
    rows: Shaped[Array, "r i"], kernel: Shaped[Array, "o i"], dtype: DTypeLike = jnp.float32
) -> Shaped[Array, "r o"]:
    """Returns rows · kernelᵀ by XLA, of one type and summed in `dtype`."""
    precision, contract_last = exact_float32(rows.dtype), (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(
        rows, kernel, contract_last, precision=precision, preferred_element_type=dtype
    )

"""How exactly products are computed."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def exact_float32(dtype: DTypeLike) -> jax.lax.Precision | None:
    """Returns the precision of products of that type: float32 means float32, not a GPU's TF32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None

"""A model on packed rows, all places at once."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from jspec.common.typing import Params
from jspec.models import LlamaConfig, init_cache, make_apply
from jspec.training.eagle_unroll import Places
from jspec.training.texts import Rows


def places_of(rows: Rows) -> Places:
    """Returns where the tokens stand."""
    return Places(jnp.asarray(rows.text), jnp.asarray(rows.positions))


def packed_hidden(
    config: LlamaConfig,
    params: Params,
    rows: Rows,
    dtype: jax.typing.DTypeLike,
    layers: tuple[int, ...] = (),
) -> Float32[Array, "b t *l d"]:
    """Returns the normed outputs of a model, of which its head makes logits.

    Args:
      config: the model's.
      params: its parameters.
      rows: each text is seen by itself.
      dtype: of keys and values.
      layers: whose outputs, [b t l d], are wanted in their place; see `ApplyFn`.
    """
    places = places_of(rows)
    b, t = places.text.shape
    _, hidden, _ = make_apply(config)(
        params,
        jnp.asarray(rows.tokens),
        init_cache(config, batch_size=b, capacity=t, dtype=dtype),
        positions=places.positions,
        block_mask=places.visible(),
        hidden_layers=layers,
        logits_at=jnp.zeros([b], jnp.int32),
    )
    return hidden

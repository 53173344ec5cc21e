"""What a frozen target says of packed texts: the material that heads are trained on."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32

from jspec.models import init_cache, make_apply
from jspec.models.layers import RMSNorm, linear, look_up
from jspec.training.eagle_unroll import Places
from jspec.training.texts import Rows
from jspec.typing import Params, Tokens
from jspec.weights.resolver import LoadedModel


class TargetStates(NamedTuple):
    """What a frozen target says of a batch of texts.

    Attributes:
      tokens: the texts, one behind another, padded, [b t].
      places: where each stands.
      is_scored: tokens whose prediction counts, [b t]: those of the answers.
      embedded: the target's embeddings of them, [b t d].
      features: its outputs at the head's feature layers, [b t l d].
      logits: of the token after each, among those that the head can propose, [b t u].
    """

    tokens: Tokens
    places: Places
    is_scored: Bool[Array, "b t"]
    embedded: Float[Array, "b t d"]
    features: Float[Array, "b t l d"]
    logits: Float32[Array, "b t u"]


StatesFn = Callable[[Params, Rows], TargetStates]


def make_states(target: LoadedModel, ids: np.ndarray, feature_layers: tuple[int, ...]) -> StatesFn:
    """Returns the function from the target's parameters and rows to its states; see `TargetStates`.

    Args:
      target: the model.
      ids: tokens that the head can propose, [u].
      feature_layers: see `EagleConfig`.
    """
    apply, config = make_apply(target.config), target.config
    dtype = target.params["embedding"].dtype
    head_name = "embedding" if config.tie_embeddings else "head"

    def states_of(params: Params, rows: Rows) -> TargetStates:
        tokens = jnp.asarray(rows.tokens)
        b, t = tokens.shape
        places = Places(jnp.asarray(rows.text), jnp.asarray(rows.positions))
        _, hidden, _ = apply(
            params,
            tokens,
            init_cache(config, batch_size=b, capacity=t, dtype=dtype),
            positions=places.positions,
            block_mask=places.visible(),
            hidden_layers=(*feature_layers, config.num_layers),
            logits_at=jnp.zeros([b], jnp.int32),
        )
        norm = RMSNorm(config.norm_epsilon)
        final = norm.apply({"params": params["final_norm"]}, hidden[:, :, -1])
        head = look_up(params[head_name], jnp.asarray(ids)[None])[0]
        return TargetStates(
            tokens=tokens,
            places=places,
            is_scored=jnp.asarray(rows.is_answer),
            embedded=look_up(params["embedding"], tokens),
            features=hidden[:, :, :-1],
            logits=linear(final, head),  # type: ignore
        )

    return jax.jit(states_of)

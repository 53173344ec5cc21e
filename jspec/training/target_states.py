"""What a frozen target says of packed texts: the material that heads are trained on."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32

from jspec.common.typing import Params, Tokens
from jspec.models import LlamaConfig
from jspec.models.layers import linear, look_up
from jspec.models.outputs import head_kernel, normed_outputs
from jspec.training.eagle_unroll import Places
from jspec.training.packed import packed_hidden, places_of
from jspec.training.texts import Rows
from jspec.weights.resolver import LoadedModel


class TargetStates(NamedTuple):
    """What a frozen target says of a batch of texts.

    Attributes:
      tokens: the texts, one behind another, padded, [b t].
      places: where each stands.
      is_scored: tokens whose prediction counts, [b t]: those of the answers.
      embedded: the target's embeddings of them, [b t d].
      features: its outputs at the head's feature layers, [b t l d].
      hidden: those of its last layer, normed, [b t d].
      logits: of the token after each, among those that the head can propose, [b t u].
    """

    tokens: Tokens
    places: Places
    is_scored: Bool[Array, "b t"]
    embedded: Float[Array, "b t d"]
    features: Float32[Array, "b t l d"]
    hidden: Float32[Array, "b t d"]
    logits: Float32[Array, "b t u"]


StatesFn = Callable[[Params, Rows], TargetStates]


def read_layers(config: LlamaConfig, feature_layers: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the layers whose outputs `make_states` needs: the feature layers and the last one."""
    return (*feature_layers, config.num_layers)


def make_reader(
    config: LlamaConfig, layers: tuple[int, ...], dtype: jax.typing.DTypeLike
) -> Callable[[Params, Rows], Float[Array, "b t l d"]]:
    """Returns the function from a model's parameters and rows to outputs of its layers.

    Args:
      config: the model's.
      layers: whose; see `ApplyFn`.
      dtype: of what it returns.
    """

    def read(params: Params, rows: Rows) -> Float[Array, "b t l d"]:
        cached = params["embedding"].dtype
        return packed_hidden(config, params, rows, cached, layers).astype(dtype)

    return jax.jit(read)


def make_states(target: LoadedModel, ids: np.ndarray, feature_layers: tuple[int, ...]) -> StatesFn:
    """Returns the function from the target's parameters and rows to its states; see `TargetStates`.

    The target runs where rows do not bring its outputs.

    Args:
      target: the model.
      ids: tokens that the head can propose, [u].
      feature_layers: see `EagleConfig`.
    """
    config = target.config
    read = make_reader(config, read_layers(config, feature_layers), jnp.float32)

    def states_of(params: Params, rows: Rows) -> TargetStates:
        outputs = read(params, rows) if rows.outputs is None else jnp.asarray(rows.outputs)
        outputs = outputs.astype(jnp.float32)
        hidden = normed_outputs(config, params, outputs[:, :, -1])
        head = look_up(head_kernel(config, params), jnp.asarray(ids)[None])[0]
        tokens = jnp.asarray(rows.tokens)
        return TargetStates(
            tokens=tokens,
            places=places_of(rows),
            is_scored=jnp.asarray(rows.is_answer),
            embedded=look_up(params["embedding"], tokens),
            features=outputs[:, :, :-1],
            hidden=hidden,
            logits=linear(hidden, head),
        )

    return jax.jit(states_of)

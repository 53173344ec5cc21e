"""Heads on the target's last hidden state as trainees: all of them are scored at every place."""

import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from jspec.common.typing import Params
from jspec.training.chain_loss import chain_loss, report, see_everywhere, weigh
from jspec.training.loop import Trainee
from jspec.training.target_states import make_states, read_layers
from jspec.training.texts import Rows
from jspec.weights.resolver import LoadedModel

# (params, target's parameters, normed last hidden states [b t d]) -> the logits of each head
SayFn = Callable[
    [Params, Params, Float32[Array, "b t d"]], Callable[[int], Float32[Array, "b t v"]]
]


def make_heads_trainee(
    target: LoadedModel,
    first: Params,
    say: SayFn,
    save: Callable[[Params, pathlib.Path], None],
    *,
    num_heads: int,
    decay: float,
) -> Trainee:
    """Returns heads to train on a target that stays as it is.

    Papers take the cross-entropy to the texts' own tokens; this is the cross-entropy to the
    distribution that they were drawn from, which is its mean over what might have been drawn.

    Args:
      target: the frozen target.
      first: parameters before the first step.
      say: what the heads say.
      save: (params in bfloat16, folder) -> nothing: writes them.
      num_heads: how many there are.
      decay: weight of each head's loss relative to the one before.
    """
    shape = target.config
    states_of = make_states(target, np.arange(shape.vocab_size), ())

    def loss(params: Params, target_params: Params, rows: Rows) -> tuple[jax.Array, dict]:
        states = jax.lax.stop_gradient(states_of(target_params, rows))
        value, metrics = chain_loss(
            say(params, target_params, states.hidden),
            see_everywhere(states),
            num_steps=num_heads,
            decay=decay,
            is_frugal=True,
        )
        return value, report(metrics)

    def evaluate(params: Params, target_params: Params, rows: Rows) -> tuple[dict, jax.Array]:
        return weigh(loss(params, target_params, rows)[1], rows)

    def store(params: Params, folder: pathlib.Path) -> None:
        save(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), folder)

    return Trainee(first, loss, evaluate, store, read_layers(shape, ()))

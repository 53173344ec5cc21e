"""Heads of Medusa (arXiv 2401.10774) as a trainee: Medusa-1, the target stays as it is."""

import dataclasses
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec.errors import check_range
from jspec.models.medusa import MedusaConfig, init_medusa_params, medusa_logits
from jspec.models.outputs import head_kernel, normed_outputs
from jspec.training.chain_loss import chain_loss, report, see_everywhere, weigh
from jspec.training.loop import Trainee
from jspec.training.target_states import make_states
from jspec.training.texts import Rows, Text
from jspec.training.training import Training
from jspec.typing import Params
from jspec.weights.medusa_head import save_medusa
from jspec.weights.resolver import LoadedModel


@dataclasses.dataclass(frozen=True)
class MedusaTraining(Training):
    """A training run of heads of Medusa; see `Training`.

    Attributes:
      num_heads: how many, one for each draft of a round.
      num_layers: residual blocks of each.
      decay: weight of each head's loss relative to the one before.
    """

    OUTPUT = "head"

    drafter: str = "medusa"
    num_heads: int = 4
    num_layers: int = 1
    decay: float = 0.8

    def make_trainee(self, target: LoadedModel, texts: Sequence[Text]) -> Trainee:
        """Returns heads that say at first what the target says; see `Training.make_trainee`."""
        del texts
        check_range("num_heads", self.num_heads, 1, 64)
        check_range("num_layers", self.num_layers, 1, 64)
        shape = target.config
        config = MedusaConfig(shape.embed_dim, shape.vocab_size, self.num_heads, self.num_layers)
        return make_medusa_trainee(target, config, decay=self.decay)


def make_medusa_trainee(target: LoadedModel, config: MedusaConfig, *, decay: float) -> Trainee:
    """Returns heads to train.

    The paper's loss is the cross-entropy to the texts' own tokens; this is the cross-entropy to the
    law that they were drawn from, which is its mean over what might have been drawn.

    Args:
      target: the frozen target.
      config: of the heads.
      decay: weight of each head's loss relative to the one before.
    """
    shape = target.config
    states_of = make_states(target, np.arange(shape.vocab_size), (shape.num_layers,))

    def loss(params: Params, target_params: Params, rows: Rows) -> tuple[jax.Array, dict]:
        states = jax.lax.stop_gradient(states_of(target_params, rows))
        hidden = normed_outputs(shape, target_params, states.features[:, :, 0])
        value, metrics = chain_loss(
            lambda step: medusa_logits(config, params[f"head_{step}"], hidden),
            see_everywhere(states),
            num_steps=config.num_heads,
            decay=decay,
            is_frugal=True,
        )
        return value, report(metrics)

    def evaluate(params: Params, target_params: Params, rows: Rows) -> tuple[dict, jax.Array]:
        return weigh(loss(params, target_params, rows)[1], rows)

    def save(params: Params, folder: pathlib.Path) -> None:
        stored = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        save_medusa(folder, config, stored, shape, base_model=target.name)

    first = init_medusa_params(config, head_kernel(shape, target.params))  # type: ignore[arg-type]
    return Trainee(first, loss, evaluate, save)

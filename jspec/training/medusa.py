"""Heads of Medusa (arXiv 2401.10774) as a trainee.

The target stays as it is (Medusa-1), or is trained with them (Medusa-2), which changes it.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float32

from jspec.common.errors import InputError, check_range
from jspec.common.typing import Params
from jspec.drafters.heads.medusa_heads import (
    MedusaConfig,
    init_medusa_params,
    load_medusa,
    medusa_logits,
    save_medusa,
)
from jspec.models.layers import head_kernel
from jspec.training.config import TrainingConfig
from jspec.training.heads import TARGET, Heads, make_heads_trainee, make_joint_trainee
from jspec.training.texts import Text
from jspec.training.trainee import Trainee
from jspec.weights.resolver import LoadedModel


@dataclasses.dataclass(frozen=True)
class MedusaTraining(TrainingConfig):
    """A training run of heads of Medusa.

    Attributes:
      num_heads: number of heads, one for each draft of a round.
      num_layers: residual blocks of each head.
      decay: weight of each head's loss relative to the one before.
      init_head: folder with heads of that shape to begin with; empty begins with the target's own.
      train_target: Medusa-2: train the target as well, beginning with heads of the first stage
        (`init_head`). IT BECOMES ANOTHER MODEL, which is written to `target/` beside `head/`; see
        `heads`.
      heads_weight: of the heads' loss beside the target's, with `train_target`; lambda 0 in the
        paper's equation. 0.2 is the value of the authors' own recipe.
      target_rate: steps of the target relative to those of the heads, with `train_target`; a fourth
        in the authors' recipe.
    """

    OUTPUT = "head"

    drafter: str = "medusa"
    num_heads: int = 4
    num_layers: int = 1
    decay: float = 0.8
    init_head: str = ""
    train_target: bool = False
    heads_weight: float = 0.2
    target_rate: float = 0.25

    def make_trainee(self, target: LoadedModel, texts: Sequence[Text]) -> Trainee:
        """Returns the heads, with the target if that is trained; see `TrainingConfig`."""
        del texts
        check_range("num_heads", self.num_heads, 1, 64)
        check_range("num_layers", self.num_layers, 1, 64)
        check_range("decay", self.decay, 0, 10)
        shape = target.config
        config = MedusaConfig(shape.embed_dim, shape.vocab_size, self.num_heads, self.num_layers)

        def logits(
            params: Params, target_params: Params, hidden: Float32[Array, "b t d"]
        ) -> Callable[[int], Float32[Array, "b t v"]]:
            del target_params
            return lambda index: medusa_logits(config, params[f"head_{index}"], hidden)

        def save(params: Params, folder: pathlib.Path) -> None:
            name = str(folder.parent / TARGET) if self.train_target else target.name
            save_medusa(folder, config, params, shape, base_model=name)

        first = self._first_heads(config, target)
        heads = Heads(first, logits, save, self.num_heads, self.decay)
        if not self.train_target:
            return make_heads_trainee(target, heads)
        self._check_joint(target)
        return make_joint_trainee(
            target, heads, heads_weight=self.heads_weight, target_rate=self.target_rate
        )

    def _first_heads(self, config: MedusaConfig, target: LoadedModel) -> Params:
        """Returns heads that predict as the target's own does, or those of a folder, in float32."""
        if not self.init_head:
            return init_medusa_params(config, head_kernel(target.config, target.params))  # type: ignore
        found = load_medusa(pathlib.Path(self.init_head), target.config, jnp.float32)
        if found.config != config:
            raise InputError(
                f"{self.init_head}: expected num_heads {config.num_heads} and num_layers "
                f"{config.num_layers}, found {found.config.num_heads} and {found.config.num_layers}"
            )
        return found.params

    def _check_joint(self, target: LoadedModel) -> None:
        check_range("heads_weight", self.heads_weight, 0, 100)
        check_range("target_rate", self.target_rate, 0, 10)
        if target.is_random:
            raise InputError(f"{target.name}: random weights have no distribution worth keeping")
        if not self.init_head:
            raise InputError(
                "train_target expects init_head, the heads of a run without it: untrained ones "
                "would spoil the target"
            )
        if self.states:
            raise InputError(
                f"expected no states with train_target, got {self.states}: what is on disk was "
                "computed by the target before it changed"
            )

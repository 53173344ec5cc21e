"""Heads of Medusa (arXiv 2401.10774) as a trainee: Medusa-1, the target stays as it is."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

from jaxtyping import Array, Float32

from jspec.errors import check_range
from jspec.models.medusa import MedusaConfig, init_medusa_params, medusa_logits
from jspec.models.outputs import head_kernel
from jspec.training.heads import make_heads_trainee
from jspec.training.loop import Trainee
from jspec.training.texts import Text
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

        def say(
            params: Params, target_params: Params, hidden: Float32[Array, "b t d"]
        ) -> Callable[[int], Float32[Array, "b t v"]]:
            del target_params
            return lambda index: medusa_logits(config, params[f"head_{index}"], hidden)

        def save(params: Params, folder: pathlib.Path) -> None:
            save_medusa(folder, config, params, shape, base_model=target.name)

        first = init_medusa_params(config, head_kernel(shape, target.params))  # type: ignore
        return make_heads_trainee(
            target, first, say, save, num_heads=self.num_heads, decay=self.decay
        )

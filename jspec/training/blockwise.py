"""The heads of blockwise parallel decoding (arXiv 1811.03115) as a trainee.

The target stays as it is, the paper's "frozen base model": its own head is the projection that all
heads share.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

import jax
from jaxtyping import Array, Float32

from jspec.common.errors import check_range
from jspec.common.typing import Params
from jspec.drafters.heads.blockwise_heads import (
    BlockwiseConfig,
    init_blockwise_params,
    inner_layer,
    place_output,
    save_blockwise,
)
from jspec.models.layers import head_kernel, linear
from jspec.training.config import TrainingConfig
from jspec.training.heads import Heads, make_heads_trainee
from jspec.training.texts import Text
from jspec.training.trainee import Trainee
from jspec.weights.resolver import LoadedModel


@dataclasses.dataclass(frozen=True)
class BlockwiseTraining(TrainingConfig):
    """A training run of the heads of blockwise decoding.

    Attributes:
      num_heads: number of heads, one for each draft of a round.
      hidden_dim: inner width of each head; 0 takes that of the target's feed-forward layers.
      decay: weight of each head's loss relative to the one before.
    """

    OUTPUT = "head"

    drafter: str = "blockwise"
    num_heads: int = 4
    hidden_dim: int = 0
    decay: float = 1.0

    def make_trainee(self, target: LoadedModel, texts: Sequence[Text]) -> Trainee:
        """Returns heads that predict at first as the target's own does; see `TrainingConfig`."""
        del texts
        check_range("num_heads", self.num_heads, 1, 64)
        check_range("decay", self.decay, 0, 10)
        check_range("hidden_dim", self.hidden_dim, 0, 10**6)
        shape = target.config
        config = BlockwiseConfig(
            shape.embed_dim, self.hidden_dim or shape.hidden_dim, self.num_heads
        )

        def logits(
            params: Params, target_params: Params, hidden: Float32[Array, "b t d"]
        ) -> Callable[[int], Float32[Array, "b t v"]]:
            inner, head = inner_layer(params, hidden), head_kernel(shape, target_params)
            return lambda index: linear(place_output(params, index, inner, hidden), head)

        def save(params: Params, folder: pathlib.Path) -> None:
            save_blockwise(folder, config, params, shape)

        first = init_blockwise_params(config, jax.random.key(self.recipe.seed))
        heads = Heads(first, logits, save, self.num_heads, self.decay)
        return make_heads_trainee(target, heads)

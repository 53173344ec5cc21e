"""Heads on the target's last hidden state as trainees: what is common, and blockwise decoding's.

The loss is the cross-entropy to the target's distribution. Papers take the cross-entropy to the
texts' own tokens; this is its mean over the tokens that the target might have written there.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from jspec.common.errors import check_range, say
from jspec.common.typing import Params
from jspec.drafters.blockwise import (
    BlockwiseConfig,
    init_blockwise_params,
    inner_layer,
    place_output,
    save_blockwise,
)
from jspec.models.layers import finish_logits, head_kernel, linear
from jspec.training.chain_loss import chain_loss, target_steps
from jspec.training.config import Trainee, TrainingConfig, cast
from jspec.training.packing import Rows
from jspec.training.target_states import TargetStates, target_states
from jspec.training.texts import Text
from jspec.weights.resolver import LoadedModel

# The step of a chain -> logits, which at index i are those of token i + 2 + step.
StepLogits: TypeAlias = Callable[[int], Float32[Array, "b t u"]]


class Heads(NamedTuple):
    """A drafter that reads the target's states, to train.

    Attributes:
      params: before the first update.
      logits: (params, target's parameters, its states, rows) -> see `StepLogits`.
      save: (params, folder) -> None: writes them.
      ids: tokens that they can propose, [u].
      num_steps: of a chain.
      decay: weight of each step's loss relative to the one before.
      layers: of the target whose outputs they read, besides the last.
      is_frugal: see `chain_loss`.
    """

    params: Params
    logits: Callable[[Params, Params, TargetStates, Rows], StepLogits]
    save: Callable[[Params, pathlib.Path], None]
    ids: Int32[np.ndarray, "u"]
    num_steps: int
    decay: float
    layers: tuple[int, ...] = ()
    is_frugal: bool = True

    def loss(
        self, params: Params, target_params: Params, states: TargetStates, rows: Rows
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the cross-entropy to the target's distribution, and metrics."""
        return chain_loss(
            self.logits(params, target_params, states, rows),
            target_steps(rows, jax.lax.stop_gradient(states), self.ids),
            num_steps=self.num_steps,
            decay=self.decay,
            is_frugal=self.is_frugal,
        )


def make_heads_trainee(target: LoadedModel, heads: Heads) -> Trainee:
    """Returns heads to train on a target that stays as it is."""
    layers = (*heads.layers, target.config.num_layers)

    def loss(params: Params, target_params: Params, rows: Rows) -> tuple[jax.Array, dict]:
        states = target_states(target.config, target_params, rows, heads.ids, layers)
        return heads.loss(params, target_params, jax.lax.stop_gradient(states), rows)

    return Trainee(heads.params, target.params, loss, heads.save, layers)


def frequent_ids(texts: Sequence[Text], vocab_size: int, number: int) -> Int32[np.ndarray, "u"]:
    """Returns the most frequent tokens of answers, which a head can propose, in rising order."""
    answers = np.concatenate([np.array(text.answer, int) for text in texts])
    # Of equally frequent tokens the smaller ids are taken.
    by_count = np.argsort(-np.bincount(answers, minlength=vocab_size), kind="stable")
    ids = np.sort(by_count[:number]).astype(np.int32)
    share = np.isin(answers, ids).mean()
    say(f"the head can propose {len(ids)} tokens, {share:.1%} of the texts")
    return ids


@dataclasses.dataclass(frozen=True)
class BlockwiseTraining(TrainingConfig):
    """A training run of the heads of blockwise parallel decoding (arXiv 1811.03115).

    The target stays as it is, the paper's "frozen base model": its own head is the projection that
    all heads share.

    Attributes:
      num_heads: number of heads, one for each draft of a round.
      hidden_dim: inner width of each head; 0 takes that of the target's feed-forward layers.
      decay: weight of each head's loss relative to the one before.
    """

    drafter: str = "blockwise"
    num_heads: int = 4
    hidden_dim: int = 0
    decay: float = 1.0

    def make_trainee(self, target: LoadedModel, texts: Sequence[Text]) -> Trainee:
        """Returns heads that at first predict what the target's head does; see `TrainingConfig`."""
        check_range("num_heads", self.num_heads, 1, 64)
        check_range("decay", self.decay, 0, 10)
        check_range("hidden_dim", self.hidden_dim, 0, 10**6)
        shape, ids = target.config, np.arange(target.config.vocab_size)
        width = self.hidden_dim or shape.hidden_dim
        config = BlockwiseConfig(shape.embed_dim, width, self.num_heads)

        def logits(params: Params, frozen: Params, states: TargetStates, rows: Rows) -> StepLogits:
            inner, head = inner_layer(params, states.hidden), head_kernel(shape, frozen)

            def head_logits(index: int) -> Float32[Array, "b t u"]:
                outputs = place_output(params, index, inner, states.hidden)
                return finish_logits(shape, linear(outputs, head))

            return head_logits

        def save(params: Params, folder: pathlib.Path) -> None:
            save_blockwise(folder, config, cast(params, jnp.bfloat16), shape)

        first = init_blockwise_params(config, jax.random.key(self.recipe.seed))
        heads = Heads(first, logits, save, ids, self.num_heads, self.decay)
        return make_heads_trainee(target, heads)
